{{/* Volumes, and where they are mounted. Each takes a component, see _names.tpl. */}}

{{/* The run file; engines and environments get one that does not tell where Redis is. */}}
{{- define "headrace.configVolume" -}}
- name: config
  configMap:
    name: {{ include "headrace.component" (dict "root" .root "component" "config") }}
    items:
      - key: {{ ternary "run.yaml" "run-without-redis.yaml" (has .component (list "trainer" "gateway")) }}
        path: run.yaml
{{- $redisCa := include "headrace.redisCaSecret" .root }}
{{- if and (has .component (list "trainer" "gateway")) $redisCa }}
- name: redis-ca
  secret:
    secretName: {{ $redisCa }}
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- include "headrace.secretVolumes" . }}
- name: tmp
  emptyDir: {}
{{- end }}

{{/* What a service shows and asks for. An environment gets a certificate of its own and the one token that is its own. */}}
{{- define "headrace.secretVolumes" -}}
{{- $tls := include "headrace.tlsSecret" . }}
{{- $auth := .root.Values.auth }}
{{- if $tls }}
- name: tls
  secret:
    secretName: {{ $tls }}
    defaultMode: 0440
    items:
      {{- range $key := list "tls.crt" "tls.key" "ca.crt" }}
      - key: {{ $key }}
        path: {{ $key }}
      {{- end }}
{{- end }}
{{- if and $auth.existingSecret (ne .component "environment") }}
- name: token
  secret:
    secretName: {{ $auth.existingSecret }}
    defaultMode: 0440
    items:
      - key: {{ $auth.key }}
        path: token
{{- end }}
{{- if and $auth.environmentsSecret (has .component (list "gateway" "environment")) }}
- name: environment-tokens
  secret:
    secretName: {{ $auth.environmentsSecret }}
    defaultMode: 0440
    items:
      {{- range $key := include "headrace.tokenKeys" . | fromJsonArray }}
      - key: {{ $key }}
        path: {{ $key }}
      {{- end }}
{{- end }}
{{- end }}

{{/* Environments whose tokens the component gets: its own; the gateway those that have one. As a JSON list. */}}
{{- define "headrace.tokenKeys" -}}
{{- $keys := list }}
{{- range $key, $environment := .root.Values.config.environments }}
{{- $has := or (not $environment.address) (hasKey $environment "token_file") }}
{{- if or (and (eq $.component "gateway") $has) (eq $key (default "" $.environment)) }}
{{- $keys = append $keys $key }}
{{- end }}
{{- end }}
{{- $keys | sortAlpha | toJson }}
{{- end }}

{{- define "headrace.secretMounts" -}}
{{- $auth := .root.Values.auth }}
{{- if include "headrace.tlsSecret" . }}
- name: tls
  mountPath: /etc/headrace-tls
  readOnly: true
{{- end }}
{{- if and $auth.existingSecret (ne .component "environment") }}
- name: token
  mountPath: /etc/headrace-token
  readOnly: true
{{- end }}
{{- if and $auth.environmentsSecret (has .component (list "gateway" "environment")) }}
- name: environment-tokens
  mountPath: /etc/headrace-environment-tokens
  readOnly: true
{{- end }}
{{- end }}

{{/* The Secret with the component's certificate; empty: it speaks plaintext. */}}
{{- define "headrace.tlsSecret" -}}
{{- if not .root.Values.tls.existingSecret }}
{{- else if eq .component "environment" }}
{{- .values.tlsSecret }}
{{- else }}
{{- .root.Values.tls.existingSecret }}
{{- end }}
{{- end }}

{{- define "headrace.configMounts" -}}
- name: config
  mountPath: /etc/headrace
  readOnly: true
{{- if and (has .component (list "trainer" "gateway")) (include "headrace.redisCaSecret" .root) }}
- name: redis-ca
  mountPath: /etc/headrace-redis-ca
  readOnly: true
{{- end }}
{{- include "headrace.secretMounts" . }}
- name: tmp
  mountPath: /tmp
{{- end }}

{{/* What services that know the model need: the run's folder, models, compiled programs, shared memory. Only the
trainer's run folder outlives its pod; the others make the small files in theirs anew. */}}
{{- define "headrace.modelVolumes" -}}
{{- $storage := .root.Values.storage }}
{{- $run := $storage.run }}
{{- if ne .component "trainer" }}
- name: run
  emptyDir: {}
{{- else if or $run.gcs.bucket $run.existingClaim }}
- name: run
  {{- include "headrace.volumeSource" (dict "volume" $run "readOnly" false) | nindent 2 }}
{{- end }}
{{- if or $storage.models.gcs.bucket $storage.models.existingClaim }}
- name: models
  {{- include "headrace.volumeSource" (dict "volume" $storage.models "readOnly" true) | nindent 2 }}
{{- end }}
{{- if ne .component "gateway" }}
- name: compilation-cache
  {{- include "headrace.volumeSource" (dict "volume" $storage.compilationCache "readOnly" false) | nindent 2 }}
- name: shared-memory
  emptyDir:
    medium: Memory
{{- end }}
{{- end }}

{{- define "headrace.modelMounts" -}}
{{- $models := .root.Values.storage.models }}
- name: run
  mountPath: /var/lib/headrace
{{- if or $models.gcs.bucket $models.existingClaim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if ne .component "gateway" }}
- name: compilation-cache
  mountPath: /var/cache/headrace
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- end }}

{{- define "headrace.volumeSource" -}}
{{- if .volume.gcs.bucket -}}
csi:
  driver: gcsfuse.csi.storage.gke.io
  readOnly: {{ .readOnly }}
  volumeAttributes:
    bucketName: {{ .volume.gcs.bucket }}
    mountOptions: {{ printf "implicit-dirs,uid=65532,gid=65532%s" (ternary (printf ",only-dir=%s" .volume.gcs.directory) "" (ne .volume.gcs.directory "")) | quote }}
{{- else if .volume.existingClaim -}}
persistentVolumeClaim:
  claimName: {{ .volume.existingClaim }}
  {{- if .readOnly }}
  readOnly: true
  {{- end }}
{{- else -}}
emptyDir: {}
{{- end }}
{{- end }}

{{/* Whether the component mounts a bucket: empty or "true". */}}
{{- define "headrace.usesGcs" -}}
{{- $storage := .root.Values.storage }}
{{- if has .component (list "trainer" "inference" "gateway") }}
{{- if $storage.models.gcs.bucket }}true
{{- else if and (eq .component "trainer") $storage.run.gcs.bucket }}true
{{- else if and (ne .component "gateway") $storage.compilationCache.gcs.bucket }}true
{{- end }}
{{- end }}
{{- end }}
