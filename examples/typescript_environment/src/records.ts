// The records of proto/headrace/v1 that this environment reads and writes, as @grpc/proto-loader gives them.

export interface Task {
  environment: string;
  split: string;
  index: string; // int64
  seed: string; // uint64
  purpose: string; // the enum's name
}

export interface Message {
  role: string;
  content: string;
}

export interface Action {
  message: Message | null;
  malformed_tool_calls: string[];
}

export interface InteractRequest {
  request?: "reset" | "action"; // which of the two is set
  reset?: Task;
  action?: Action;
}

export interface InteractResponse {
  messages?: Message[];
  reward?: number; // left out: no signal, which differs from 0
  terminated?: boolean;
  metrics?: Record<string, number>;
}

export interface EnvironmentInfo {
  name: string;
  description: string;
  splits: { name: string; task_count: number }[];
  metric_names: string[];
}
