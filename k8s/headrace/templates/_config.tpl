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
{{- $environment := get $config.environments $key }}
{{- $_ := set $environment "address" (printf "%s.%s.svc:50051" $name $namespace) }}
{{- if $root.Values.auth.environmentsSecret }}
{{- $_ := set $environment "token_file" (printf "/etc/headrace-environment-tokens/%s" $key) }}
{{- end }}
{{- end }}
{{- $security := dict }}
{{- if $root.Values.tls.existingSecret }}
{{- $tls := dict "certificate" "/etc/headrace-tls/tls.crt" "key" "/etc/headrace-tls/tls.key" "authority" "/etc/headrace-tls/ca.crt" }}
{{- $_ := set $security "tls" (set $tls "client_certificates" $root.Values.tls.clientCertificates) }}
{{- end }}
{{- if $root.Values.auth.existingSecret }}
{{- $_ := set $security "token_file" "/etc/headrace-token/token" }}
{{- end }}
{{- if $security }}
{{- $_ := set $config "security" $security }}
{{- end }}
{{- $redis := default dict $config.redis }}
{{- $_ := set $redis "url" (ternary (include "headrace.redisUrl" $root) "" .redis) }}
{{- $_ := set $config "redis" $redis }}
{{- toYaml $config }}
{{- end }}

{{/* The address in the run file: a variable of the environment where a Secret has part in it. */}}
{{- define "headrace.redisUrl" -}}
{{- if and .Values.redis.enabled (not .Values.redis.auth.existingSecret) }}
{{- include "headrace.redisOurs" (dict "root" . "login" "") }}
{{- else }}
{{- print "${HEADRACE_REDIS_URL}" }}
{{- end }}
{{- end }}

{{/* The address of our own. Takes root and login. */}}
{{- define "headrace.redisOurs" -}}
{{- $tls := .root.Values.redis.tlsSecret }}
{{- printf "%s://%s%s/0%s" (ternary "rediss" "redis" (ne $tls "")) .login (include "headrace.redisAddress" .root) (ternary "?ssl_ca_certs=/etc/headrace-redis-ca/ca.crt" "" (ne $tls "")) }}
{{- end }}

{{/* The Secret whose ca.crt signed Redis's certificate; empty: none of ours to know. */}}
{{- define "headrace.redisCaSecret" -}}
{{- ternary .Values.redis.tlsSecret .Values.redis.external.caSecret .Values.redis.enabled }}
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
  value: {{ include "headrace.redisOurs" (dict "root" . "login" ":$(HEADRACE_REDIS_PASSWORD)@") }}
{{- end }}
{{- end }}

{{/* Pods restart when what they read changes. */}}
{{- define "headrace.configChecksum" -}}
{{- include "headrace.config" (dict "root" . "redis" true) | sha256sum }}
{{- end }}
