{{/* What a schema cannot see, refused at render with the remedy. */}}

{{- define "headrace.check" -}}
{{- $config := .Values.config }}
{{- if not $config.environments }}
{{- fail "config.environments is empty: pass a values file with a whole `config`, such as k8s/values/laptop.yaml" }}
{{- end }}
{{- $run := default dict $config.run }}
{{- $inference := default dict $config.inference }}
{{- $owned := list
  (list "run.directory" (hasKey $run "directory") "the chart mounts it; see storage.run")
  (list "trainer.address" (hasKey $config.trainer "address") "the chart knows it")
  (list "rollout.replicas" (hasKey $config.rollout "replicas") "it is for `headrace run`; set gateway.replicas")
  (list "inference.replicas" (hasKey $inference "replicas") "it is for `headrace run`; set inference.replicas at the top")
  (list "inference.compilation_cache" (hasKey $inference "compilation_cache") "the chart mounts it; see storage.compilationCache")
  (list "inference.addresses" (and .Values.inference.enabled (hasKey $inference "addresses")) "the chart serves engines; set inference.enabled: false to use others")
  (list "security" (hasKey $config "security") "the chart mounts the files; see tls and auth")
  (list "redis.url" (hasKey (default dict $config.redis) "url") "it may hold a password; see redis.external")
}}
{{- range $owned }}
{{- if index . 1 }}
{{- fail (printf "config.%s must not be set: %s" (index . 0) (index . 2)) }}
{{- end }}
{{- end }}
{{- if and (not .Values.inference.enabled) (not $inference.addresses) }}
{{- fail "inference.enabled is false: name the engines in config.inference.addresses" }}
{{- end }}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$" (include "headrace.runId" .)) }}
{{- fail (printf "the release's name %q cannot be a run id: set config.run.id" .Release.Name) }}
{{- end }}
{{- include "headrace.checkEnvironments" . }}
{{- include "headrace.checkRedis" . }}
{{- include "headrace.checkSecurity" . }}
{{- include "headrace.checkOthersToken" . }}
{{- include "headrace.checkTraces" . }}
{{- include "headrace.checkTpu" (dict "of" "trainer" "tpu" .Values.trainer.tpu) }}
{{- include "headrace.checkTpu" (dict "of" "inference" "tpu" .Values.inference.tpu) }}
{{- include "headrace.checkDevices" . }}
{{- include "headrace.checkStorage" . }}
{{- include "headrace.checkDrain" (dict "of" "gateway" "grace" .Values.gateway.terminationGracePeriodSeconds "key" "rollout" "drain" (default 10 (default dict $config.rollout).drain_timeout_s)) }}
{{- include "headrace.checkDrain" (dict "of" "inference" "grace" .Values.inference.terminationGracePeriodSeconds "key" "inference" "drain" (default 8 $inference.drain_timeout_s)) }}
{{- range $component := list "inference" "gateway" "environment" }}
{{- $scaling := (get $.Values $component).autoscaling }}
{{- if gt ($scaling.minReplicas | int) ($scaling.maxReplicas | int) }}
{{- fail (printf "%s.autoscaling.minReplicas %v is above maxReplicas %v" $component $scaling.minReplicas $scaling.maxReplicas) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "headrace.checkEnvironments" -}}
{{- $names := dict }}
{{- range $key := include "headrace.environments" . | fromJsonArray }}
{{- $name := include "headrace.component" (dict "root" $ "component" "environment" "environment" $key) }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) }}
{{- fail (printf "environment %q: name it with letters, digits, - and _" $key) }}
{{- end }}
{{- if hasKey $names $name }}
{{- fail (printf "environments %q and %q would both be named %s: rename one" (get $names $name) $key $name) }}
{{- end }}
{{- $_ := set $names $name $key }}
{{- end }}
{{- range $key, $_ := .Values.environments }}
{{- if not (hasKey $.Values.config.environments $key) }}
{{- fail (printf "environments.%s: config.environments has no such key" $key) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A token in plaintext is no secret, and an environment must hold nobody else's. */}}
{{- define "headrace.checkSecurity" -}}
{{- $tls := .Values.tls.existingSecret }}
{{- if and (or .Values.auth.existingSecret .Values.auth.environmentsSecret) (not $tls) }}
{{- fail "auth: a token that is sent in plaintext is no secret; set tls.existingSecret too" }}
{{- end }}
{{- range $key := include "headrace.environments" . | fromJsonArray }}
{{- $values := include "headrace.environmentValues" (dict "root" $ "component" "environment" "environment" $key) | fromJson }}
{{- if and $tls (not $values.tlsSecret) }}
{{- fail (printf "tls.existingSecret is set: give environment %s a certificate of its own in environment.tlsSecret or environments.%s.tlsSecret" $key $key) }}
{{- end }}
{{- if and $tls (eq $values.tlsSecret $tls) }}
{{- fail (printf "environment %s must not hold the other services' key: let tlsSecret be another Secret than tls.existingSecret" $key) }}
{{- end }}
{{- $config := get $.Values.config.environments $key }}
{{- if or (hasKey $config "tls") (hasKey $config "token_file") }}
{{- fail (printf "config.environments.%s: tls and token_file must not be set: the chart serves it; see environment.tlsSecret and auth.environmentsSecret" $key) }}
{{- end }}
{{- end }}
{{- end }}

{{/* An environment that somebody else serves takes its token from the same Secret. */}}
{{- define "headrace.checkOthersToken" -}}
{{- range $key, $environment := .Values.config.environments }}
{{- $path := printf "/etc/headrace-environment-tokens/%s" $key }}
{{- if and $environment.address $environment.token_file (or (ne $environment.token_file $path) (not $.Values.auth.environmentsSecret)) }}
{{- fail (printf "config.environments.%s.token_file must be %s, where auth.environmentsSecret is mounted; put the token under that key" $key $path) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "headrace.checkTraces" -}}
{{- $traces := default dict (default dict .Values.config.telemetry).traces }}
{{- if and $traces.endpoint .Values.networkPolicy.enabled (not .Values.networkPolicy.traceCollector) }}
{{- fail "config.telemetry.traces.endpoint is set: say in networkPolicy.traceCollector where that collector is, or nobody may reach it" }}
{{- end }}
{{- end }}

{{- define "headrace.checkRedis" -}}
{{- $redis := .Values.redis }}
{{- if and (not $redis.enabled) (not $redis.external.existingSecret) }}
{{- fail "redis.enabled is false: put the address of yours into a Secret and name it in redis.external.existingSecret" }}
{{- end }}
{{- if and (not $redis.enabled) (eq .Values.gateway.autoscaling.kind "keda") (not $redis.external.address) }}
{{- fail "gateway.autoscaling.kind keda asks Redis: set redis.external.address to its HOST:PORT" }}
{{- end }}
{{- end }}

{{/* The slice's shape must hold the hosts' chips: the product of the topology = hosts x chips. */}}
{{- define "headrace.checkTpu" -}}
{{- with .tpu }}
{{- $product := 1 }}
{{- $sides := splitList "x" .topology }}
{{- range $sides }}
{{- $product = mul $product (int .) }}
{{- end }}
{{- $chips := mul (int .hosts) (int .chipsPerHost) }}
{{- if ne $product $chips }}
{{- fail (printf "%s.tpu: topology %s has %d chips, but %v hosts x %v chipsPerHost are %d" $.of .topology $product .hosts .chipsPerHost $chips) }}
{{- end }}
{{- $flat := has .accelerator (list "tpu-v5-lite-podslice" "tpu-v6e-slice") }}
{{- if ne (len $sides) (ternary 2 3 $flat) }}
{{- fail (printf "%s.tpu: a topology of %s has %d sides, not %s" $.of .accelerator (ternary 2 3 $flat) .topology) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The run file must use exactly the chips that the pods get. */}}
{{- define "headrace.checkDevices" -}}
{{- $inference := default dict .Values.config.inference }}
{{- $device := default "cpu" $inference.device }}
{{- if .Values.inference.enabled }}
{{- if ne (eq $device "tpu") (not (empty .Values.inference.tpu)) }}
{{- fail (printf "config.inference.device is %s, but inference.tpu is %s: set both or neither" $device (ternary "empty" "set" (empty .Values.inference.tpu))) }}
{{- end }}
{{- with .Values.inference.tpu }}
{{- $chips := mul (int .hosts) (int .chipsPerHost) }}
{{- if ne (default 1 $inference.tensor_parallel | int) ($chips | int) }}
{{- fail (printf "config.inference.tensor_parallel must be %d, the chips of one engine (inference.tpu)" $chips) }}
{{- end }}
{{- end }}
{{- end }}
{{- $mesh := default dict .Values.config.trainer.mesh }}
{{- $fsdp := -1 }}
{{- if hasKey $mesh "fsdp" }}
{{- $fsdp = int $mesh.fsdp }}
{{- end }}
{{- $tensor := default 1 $mesh.tensor | int }}
{{- with .Values.trainer.tpu }}
{{- $chips := mul (int .hosts) (int .chipsPerHost) (default 1 .slices | int) }}
{{- if and (gt $fsdp 0) (ne (mul $fsdp $tensor) $chips) }}
{{- fail (printf "config.trainer.mesh: fsdp %d x tensor %d are %d devices, but trainer.tpu has %d chips" $fsdp $tensor (mul $fsdp $tensor) $chips) }}
{{- else if ne (mod $chips $tensor) 0 }}
{{- fail (printf "config.trainer.mesh.tensor %d does not divide the %d chips of trainer.tpu" $tensor $chips) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "headrace.checkStorage" -}}
{{- $storage := .Values.storage }}
{{- range $name := list "run" "models" "compilationCache" }}
{{- $volume := get $storage $name }}
{{- if and $volume.gcs.bucket $volume.existingClaim }}
{{- fail (printf "storage.%s: set gcs.bucket or existingClaim, not both" $name) }}
{{- end }}
{{- end }}
{{- $shared := or $storage.run.gcs.bucket $storage.run.existingClaim }}
{{- if and (eq (include "headrace.trainerKind" .) "JobSet") (not $shared) }}
{{- fail "the trainer is a JobSet: its hosts share the run's folder, so set storage.run.gcs.bucket or existingClaim" }}
{{- end }}
{{- with .Values.config.model.path }}
{{- if not (hasPrefix "/models/" .) }}
{{- fail (printf "config.model.path %s must lie in /models, where storage.models is mounted" .) }}
{{- end }}
{{- if not (or $storage.models.gcs.bucket $storage.models.existingClaim) }}
{{- fail "config.model.path is set: say in storage.models where the folder lies" }}
{{- end }}
{{- end }}
{{- end }}

{{/* A pod is killed when its grace period is over: the pause before SIGTERM and the drain must fit in, with a reserve. */}}
{{- define "headrace.checkDrain" -}}
{{- if lt (float64 .grace) (addf (float64 .drain) (include "headrace.preStopSeconds" .grace | float64) 2) }}
{{- fail (printf "%s.terminationGracePeriodSeconds %v is too short: it holds a pause of %s s, config.%s.drain_timeout_s %v and 2 s" .of .grace (include "headrace.preStopSeconds" .grace) .key .drain) }}
{{- end }}
{{- end }}
