{{/* The run file: the user's config with what only the chart knows. */}}

{{- define "headrace.runId" -}}
{{- $run := default dict .Values.config.run }}
{{- default .Release.Name $run.id }}
{{- end }}

{{/* As YAML. Takes a dict: root, and redis: whether the reader may know where Redis is. */}}
{{- define "headrace.config" -}}
{{- $root := .root }}
{{- $config := deepCopy $root.Values.config }}
{{- $namespace := $root.Release.Namespace }}
{{- $run := default dict $config.run }}
{{- $_ := set $run "id" (include "headrace.runId" $root) }}
{{- $_ := set $run "directory" "/var/lib/headrace" }}
{{- $_ := set $config "run" $run }}
{{- $trainer := include "headrace.component" (dict "root" $root "component" "trainer") }}
{{- $_ := set $config.trainer "address" (printf "%s.%s.svc:50051" $trainer $namespace) }}
{{- $inference := default dict $config.inference }}
{{- if $root.Values.inference.enabled }}
{{- $engines := include "headrace.component" (dict "root" $root "component" "inference") }}
{{- $_ := set $inference "addresses" (list (printf "%s.%s.svc:30000" $engines $namespace)) }}
{{- $_ := set $inference "compilation_cache" "/var/cache/headrace" }}
{{- end }}
{{- $_ := set $config "inference" $inference }}
{{- range $key := include "headrace.environments" $root | fromJsonArray }}
{{- $name := include "headrace.component" (dict "root" $root "component" "environment" "environment" $key) }}
{{- $_ := set (get $config.environments $key) "address" (printf "%s.%s.svc:50051" $name $namespace) }}
{{- end }}
{{- $redis := default dict $config.redis }}
{{- $_ := set $redis "url" (ternary (include "headrace.redisUrl" $root) "" .redis) }}
{{- $_ := set $config "redis" $redis }}
{{- toYaml $config }}
{{- end }}

{{/* The address in the run file: a variable of the environment where a Secret has part in it. */}}
{{- define "headrace.redisUrl" -}}
{{- if and .Values.redis.enabled (not .Values.redis.auth.existingSecret) }}
{{- printf "redis://%s/0" (include "headrace.redisAddress" .) }}
{{- else }}
{{- print "${HEADRACE_REDIS_URL}" }}
{{- end }}
{{- end }}

{{- define "headrace.redisAddress" -}}
{{- if .Values.redis.enabled }}
{{- printf "%s.%s.svc:6379" (include "headrace.component" (dict "root" . "component" "redis")) .Release.Namespace }}
{{- else }}
{{- .Values.redis.external.address }}
{{- end }}
{{- end }}

{{/* Environment variables that carry what a Secret has part in. */}}
{{- define "headrace.redisEnv" -}}
{{- $redis := .Values.redis }}
{{- if not $redis.enabled }}
- name: HEADRACE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $redis.external.existingSecret }}
      key: {{ $redis.external.key }}
{{- else if $redis.auth.existingSecret }}
- name: HEADRACE_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.auth.existingSecret }}
      key: {{ $redis.auth.key }}
- name: HEADRACE_REDIS_URL
  value: redis://:$(HEADRACE_REDIS_PASSWORD)@{{ include "headrace.redisAddress" . }}/0
{{- end }}
{{- end }}

{{/* Pods restart when what they read changes. */}}
{{- define "headrace.configChecksum" -}}
{{- include "headrace.config" (dict "root" . "redis" true) | sha256sum }}
{{- end }}
