{{/* Names, labels and images. Most take a component: a dict with `root` (the chart's context), `component` (what the
object is), `values` (its part of values.yaml) and, for an environment, `environment` (its key in the run file). */}}

{{- define "headrace.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "headrace.component" -}}
{{- if .environment }}
{{- printf "%s-env-%s" (include "headrace.fullname" .root) (include "headrace.dns" .environment) | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" (include "headrace.fullname" .root) .component }}
{{- end }}
{{- end }}

{{- define "headrace.dns" -}}
{{- . | lower | replace "_" "-" | replace "." "-" }}
{{- end }}

{{/* One ServiceAccount for each kind of component; environments share theirs, which can do nothing. */}}
{{- define "headrace.serviceAccount" -}}
{{- printf "%s-%s" (include "headrace.fullname" .root) .component }}
{{- end }}

{{- define "headrace.releaseSelector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.selector" -}}
{{ include "headrace.releaseSelector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .environment }}
headrace/environment: {{ include "headrace.dns" . }}
{{- end }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: headrace
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "headrace.image" -}}
{{- $image := .values.image }}
{{- $path := $image.repository }}
{{- if and .root.Values.image.registry (ne .component "redis") }}
{{- $path = printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) $path }}
{{- end }}
{{- if $image.digest }}
{{- printf "%s@%s" $path $image.digest }}
{{- else }}
{{- printf "%s:%s" $path (coalesce $image.tag .root.Values.image.tag .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* Keys of the environments that the chart serves: those without an address, as a JSON list. */}}
{{- define "headrace.environments" -}}
{{- $served := list }}
{{- range $key, $environment := .Values.config.environments }}
{{- if not (or $environment.address (eq (default "gateway" $environment.driver) "external")) }}
{{- $served = append $served $key }}
{{- end }}
{{- end }}
{{- $served | sortAlpha | toJson }}
{{- end }}

{{/* The values of one environment: `environment`, overlaid by environments.KEY. */}}
{{- define "headrace.environmentValues" -}}
{{- $own := default dict (get .root.Values.environments .environment) }}
{{- mergeOverwrite (deepCopy .root.Values.environment) (deepCopy $own) | toJson }}
{{- end }}

{{- define "headrace.trainerKind" -}}
{{- $tpu := .Values.trainer.tpu }}
{{- $hosts := mul (default 1 $tpu.hosts | int) (default 1 $tpu.slices | int) }}
{{- default (ternary "JobSet" "StatefulSet" (gt $hosts 1)) .Values.trainer.kind }}
{{- end }}

{{- define "headrace.inferenceKind" -}}
{{- ternary "LeaderWorkerSet" "Deployment" (gt (default 1 .Values.inference.tpu.hosts | int) 1) }}
{{- end }}
