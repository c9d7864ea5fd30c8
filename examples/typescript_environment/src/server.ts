// Serves the environment to Headrace's gateways: one Interact stream is one episode.
//
//     node dist/server.js HOST:PORT [CAPACITY]
//
// The protos are loaded from PROTO_DIR, by default the repository's proto/.

import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import * as protoLoader from "@grpc/proto-loader";
import type { InteractRequest, InteractResponse } from "./records.js";
import { INFO, Spell } from "./spell.js";

const [address = "127.0.0.1:50051", capacity = "1024"] = process.argv.slice(2);
const protos = process.env["PROTO_DIR"] ?? fileURLToPath(new URL("../../../proto", import.meta.url));

class Refusal extends Error {
  constructor(readonly code: grpc.status, readonly details: string) {
    super(details);
  }
}

let taken = 0;

function interact(call: grpc.ServerDuplexStream<InteractRequest, InteractResponse>): void {
  let episode: Spell | undefined;
  let open = true;

  // Exactly once, whoever ends the stream and however.
  const close = (): void => {
    if (open && episode) taken -= 1;
    open = false;
  };

  const answer = (request: InteractRequest): InteractResponse => {
    if (request.reset) {
      if (episode) throw new Refusal(grpc.status.FAILED_PRECONDITION, "one stream is one episode");
      const { environment, split, index, purpose } = request.reset;
      if (environment !== INFO.name || !INFO.splits.some((known) => known.name === split))
        throw new Refusal(grpc.status.NOT_FOUND, `no ${environment}/${split} here`);
      if (purpose === "PURPOSE_DEMONSTRATION")
        throw new Refusal(grpc.status.FAILED_PRECONDITION, "there is no expert to demonstrate");
      if (purpose === "PURPOSE_UNSPECIFIED" || BigInt(index) < 0n)
        throw new Refusal(grpc.status.INVALID_ARGUMENT, "the task needs a purpose and an index of 0 or more");
      if (taken >= Number(capacity)) throw new Refusal(grpc.status.RESOURCE_EXHAUSTED, "try another replica");
      taken += 1;
      episode = new Spell(request.reset);
      return episode.reset();
    }
    if (!request.action) throw new Refusal(grpc.status.INVALID_ARGUMENT, "the request is empty");
    if (!episode || episode.ended) throw new Refusal(grpc.status.FAILED_PRECONDITION, "there is no open episode");
    return episode.step(request.action);
  };

  call.on("data", (request: InteractRequest) => {
    if (!open) return;
    try {
      call.write(answer(request));
    } catch (error) {
      close();
      const refusal = error instanceof Refusal ? error : new Refusal(grpc.status.INTERNAL, String(error));
      call.emit("error", { code: refusal.code, details: refusal.details });
    }
  });
  call.on("end", () => {
    close();
    call.end();
  });
  call.on("cancelled", close);
}

const definition = protoLoader.loadSync("headrace/v1/environment_service.proto", {
  includeDirs: [protos], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true,
});
const loaded = grpc.loadPackageDefinition(definition) as unknown as {
  headrace: { v1: { EnvironmentService: grpc.ServiceClientConstructor } };
};

const server = new grpc.Server();
server.addService(loaded.headrace.v1.EnvironmentService.service, {
  ListEnvironments: (_: unknown, reply: grpc.sendUnaryData<unknown>) => reply(null, { environments: [INFO] }),
  Interact: interact,
});
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) {
    console.error(`error: ${error.message}`);
    process.exit(2);
  }
  console.log(`serving ${INFO.name} on port ${port}`);
});
// New episodes are refused, running ones may end.
process.once("SIGTERM", () => server.tryShutdown(() => process.exit(0)));
process.once("SIGINT", () => process.exit(130));
