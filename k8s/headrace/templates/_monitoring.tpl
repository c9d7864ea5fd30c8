{{/* Components that export metrics, as JSON: [{component, port}]. */}}
{{- define "headrace.monitored" -}}
{{- $components := list (dict "component" "trainer" "port" "metrics") (dict "component" "gateway" "port" "metrics") (dict "component" "environment" "port" "metrics") }}
{{- if .Values.inference.enabled }}
{{- $components = append $components (dict "component" "inference" "port" "http" "tls" (ne .Values.tls.existingSecret "")) }}
{{- end }}
{{- $components | toJson }}
{{- end }}
