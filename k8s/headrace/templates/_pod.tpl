{{/* What pods have in common. Each takes a component, see _names.tpl. */}}

{{- define "headrace.podMetadata" -}}
{{- $gcs := include "headrace.usesGcs" . }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
annotations:
  checksum/config: {{ include "headrace.configChecksum" .root }}
  {{- if $gcs }}
  gke-gcsfuse/volumes: "true"
  {{- end }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Who the pod is, and where it may run. */}}
{{- define "headrace.podSpec" -}}
{{- $provisioning := .values.provisioning }}
{{- $tpu := .values.tpu }}
serviceAccountName: {{ include "headrace.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "headrace.podSecurity" (default 65532 .user) | nindent 2 }}
{{- with .values.terminationGracePeriodSeconds }}
terminationGracePeriodSeconds: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $provisioning.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $selector := dict }}
{{- $tolerations := list }}
{{- if $tpu }}
{{- $_ := set $selector "cloud.google.com/gke-tpu-accelerator" $tpu.accelerator }}
{{- $_ := set $selector "cloud.google.com/gke-tpu-topology" $tpu.topology }}
{{- $tolerations = append $tolerations (dict "key" "google.com/tpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- if $provisioning.spot }}
{{- $_ := set $selector "cloud.google.com/gke-spot" "true" }}
{{- $tolerations = append $tolerations (dict "key" "cloud.google.com/gke-spot" "operator" "Equal" "value" "true" "effect" "NoSchedule") }}
{{- end }}
{{- if $provisioning.flexStart }}
{{- $_ := set $selector "cloud.google.com/gke-flex-start" "true" }}
{{- $tolerations = append $tolerations (dict "key" "cloud.google.com/gke-flex-start" "operator" "Equal" "value" "true" "effect" "NoSchedule") }}
{{- end }}
{{- if $provisioning.computeClass }}
{{- $_ := set $selector "cloud.google.com/compute-class" $provisioning.computeClass }}
{{- $tolerations = append $tolerations (dict "key" "cloud.google.com/compute-class" "operator" "Equal" "value" $provisioning.computeClass "effect" "NoSchedule") }}
{{- end }}
{{- if $provisioning.queueName }}
{{- $tolerations = append $tolerations (dict "key" "cloud.google.com/gke-queued" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with mergeOverwrite $selector (deepCopy .values.nodeSelector) }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat $tolerations .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.topologySpread }}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "headrace.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop:
    - ALL
{{- end }}

{{/* Resources; the chips of a TPU host are requested whole, with equal limits. */}}
{{- define "headrace.resources" -}}
{{- $resources := deepCopy .values.resources }}
{{- with .values.tpu }}
{{- range $part := list "requests" "limits" }}
{{- $amounts := default dict (get $resources $part) }}
{{- $_ := set $resources $part (set $amounts "google.com/tpu" ($.values.tpu.chipsPerHost | toString)) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* What every service of ours can write to: nothing but these. */}}
{{- define "headrace.env" -}}
- name: HOME
  value: /tmp
- name: PYTHONUNBUFFERED
  value: "1"
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A gRPC probe, at the port that speaks plaintext for it. `liveness` answers from the first moment on; the empty
service once there is something to serve. */}}
{{- define "headrace.grpcProbes" -}}
startupProbe:
  grpc:
    port: 50052
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .values.startupSeconds) 9) 10 }}
livenessProbe:
  grpc:
    port: 50052
    service: liveness
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  grpc:
    port: 50052
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{/* Endpoints learn of a pod's end later than the pod does: it serves on meanwhile. */}}
{{- define "headrace.lifecycle" -}}
preStop:
  sleep:
    seconds: {{ include "headrace.preStopSeconds" .values.terminationGracePeriodSeconds }}
{{- end }}

{{- define "headrace.preStopSeconds" -}}
{{- min 5 (div (int .) 4) }}
{{- end }}
