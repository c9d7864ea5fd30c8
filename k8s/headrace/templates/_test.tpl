{{/* A `helm test` pod that runs files/check.py with the given args. Takes root, name and args. */}}
{{- define "headrace.testPod" -}}
{{- $component := dict "root" .root "component" "test" "values" (dict "image" .root.Values.gateway.image) -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "headrace.fullname" .root }}-test-{{ .name }}
  labels:
    {{- include "headrace.labels" $component | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "headrace.podSecurity" 65532 | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: check
      image: {{ include "headrace.image" $component }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command:
        - python
        - /check/check.py
      args:
        {{- toYaml .args | nindent 8 }}
        {{- if .root.Values.tls.existingSecret }}
        - --authority=/etc/headrace-tls/ca.crt
        - --certificate=/etc/headrace-tls/tls.crt
        - --key=/etc/headrace-tls/tls.key
        {{- end }}
        {{- if .root.Values.auth.existingSecret }}
        - --token-file=/etc/headrace-token/token
        {{- end }}
      resources:
        requests: {cpu: 100m, memory: 128Mi}
        limits: {memory: 256Mi}
      securityContext:
        {{- include "headrace.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: check
          mountPath: /check
          readOnly: true
        {{- include "headrace.secretMounts" $component | nindent 8 }}
  volumes:
    - name: check
      configMap:
        name: {{ include "headrace.fullname" .root }}-test
    {{- include "headrace.secretVolumes" $component | nindent 4 }}
{{- end }}
