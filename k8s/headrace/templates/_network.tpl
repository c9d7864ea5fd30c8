{{/* Parts of network policies. */}}

{{/* A peer: the release's pods of one component. Takes root and component. */}}
{{- define "headrace.peer" -}}
- podSelector:
    matchLabels:
      {{- include "headrace.selector" . | nindent 6 }}
{{- end }}

{{- define "headrace.dnsEgress" -}}
# Names are resolved by kube-dns, on GKE possibly through a cache on the node.
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end }}

{{/* Cloud Storage and the node's metadata server, which hands out the pod's Google identity. */}}
{{- define "headrace.gcsEgress" -}}
- to:
    - ipBlock:
        cidr: 169.254.169.254/32
    - ipBlock:
        cidr: 169.254.169.252/32
  ports:
    - port: 80
    - port: 988
    - port: 987
- to:
    - ipBlock:
        cidr: 0.0.0.0/0
        except:
          - 10.0.0.0/8
          - 172.16.0.0/12
          - 192.168.0.0/16
          - 169.254.0.0/16
  ports:
    - port: 443
{{- end }}

{{- define "headrace.redisEgress" -}}
{{- if .Values.redis.enabled }}
- to:
    {{- include "headrace.peer" (dict "root" . "component" "redis") | nindent 4 }}
  ports:
    - port: 6379
{{- else }}
{{- with .Values.redis.external.cidr }}
- to:
    - ipBlock:
        cidr: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Ports on which weights travel: over gRPC, and where there is no TLS beside it. */}}
{{- define "headrace.weightPorts" -}}
- port: 50051
{{- if not .Values.tls.existingSecret }}
- port: 50053
{{- end }}
{{- end }}

{{- define "headrace.tracesEgress" -}}
{{- with .Values.networkPolicy.traceCollector }}
- to:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{- define "headrace.metricsIngress" -}}
{{- with .root.Values.networkPolicy.monitoring }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - port: {{ $.port }}
{{- end }}
{{- end }}

{{/* The head of a component's policy. */}}
{{- define "headrace.networkPolicyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "headrace.component" . }}
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
{{- end }}
