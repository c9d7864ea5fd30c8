{{/* Autoscalers. Each metric named here is one that a service exports; a test compares them. */}}

{{/* What is scaled. Takes a component. */}}
{{- define "headrace.scaleTarget" -}}
{{- if and (eq .component "inference") (eq (include "headrace.inferenceKind" .root) "LeaderWorkerSet") -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "headrace.component" . }}
{{- end }}

{{/* A metric's name in the API that an HPA asks. */}}
{{- define "headrace.hpaMetric" -}}
{{- replace "%s" .metric .root.Values.monitoring.metricFormat | quote }}
{{- end }}

{{/* The head of a HorizontalPodAutoscaler. */}}
{{- define "headrace.hpaHead" -}}
{{- $scaling := .values.autoscaling -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "headrace.component" . }}
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "headrace.scaleTarget" . | nindent 4 }}
  minReplicas: {{ $scaling.minReplicas }}
  maxReplicas: {{ $scaling.maxReplicas }}
  behavior:
    {{- include "headrace.scaleDown" . | nindent 4 }}
{{- end }}

{{- define "headrace.scaleDown" -}}
scaleDown:
  stabilizationWindowSeconds: {{ .values.autoscaling.scaleDownSeconds }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: 60
{{- end }}

{{/* The head of a ScaledObject. */}}
{{- define "headrace.scaledObjectHead" -}}
{{- $scaling := .values.autoscaling -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ include "headrace.component" . }}
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    {{- include "headrace.scaleTarget" . | nindent 4 }}
  minReplicaCount: {{ $scaling.minReplicas }}
  maxReplicaCount: {{ $scaling.maxReplicas }}
  pollingInterval: 15
  cooldownPeriod: {{ $scaling.scaleDownSeconds }}
  {{- if gt ($scaling.minReplicas | int) 0 }}
  # Without its metric a service keeps the replicas it has at least.
  fallback:
    failureThreshold: 5
    replicas: {{ $scaling.minReplicas }}
    behavior: currentReplicasIfHigher
  {{- end }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        {{- include "headrace.scaleDown" . | nindent 8 }}
{{- end }}

{{/* A KEDA trigger on a PromQL query. Takes root, query and threshold. */}}
{{- define "headrace.prometheusTrigger" -}}
- type: prometheus
  metadata:
    serverAddress: {{ .root.Values.monitoring.prometheusAddress }}
    query: {{ .query | quote }}
    threshold: {{ .threshold | quote }}
{{- end }}
