{{/* An engine's pod: the same for a Deployment and for each host of a LeaderWorkerSet. Takes a component, with `rank`:
what a host of several is told of the others. */}}

{{- define "headrace.inferencePod" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne (include "headrace.tlsSecret" .) "") }}
{{- include "headrace.podSpec" . }}
containers:
  - name: inference
    image: {{ include "headrace.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args:
      - --config=/etc/headrace/run.yaml
      - --listen=0.0.0.0:30000
      - --weights-listen=0.0.0.0:50051
      - --bulk-listen=0.0.0.0:50053
      - --name=$(POD_NAME)
      {{- if .multiHost }}
      - --nodes={{ .values.tpu.hosts }}
      - --node-rank=$(LWS_WORKER_INDEX)
      - --coordinator=$(LWS_LEADER_ADDRESS):5000
      {{- end }}
    env:
      - name: POD_NAME
        valueFrom:
          fieldRef:
            fieldPath: metadata.name
      {{- include "headrace.env" . | nindent 6 }}
    ports:
      - name: http
        containerPort: 30000
      - name: weights
        containerPort: 50051
      - name: bulk
        containerPort: 50053
      {{- if .values.tpu }}
      - name: tpu
        containerPort: 8471
      {{- end }}
      {{- if .multiHost }}
      - name: coordinator
        containerPort: 5000
      {{- end }}
    {{- if .serves }}
    startupProbe:
      httpGet:
        port: http
        scheme: {{ $scheme }}
        path: /health
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ div (add (int .values.startupSeconds) 9) 10 }}
    livenessProbe:
      httpGet:
        port: http
        scheme: {{ $scheme }}
        path: /health
      periodSeconds: 20
      timeoutSeconds: 10
      failureThreshold: 6
    readinessProbe:
      httpGet:
        port: http
        scheme: {{ $scheme }}
        path: /ready
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    {{- end }}
    lifecycle:
      {{- include "headrace.lifecycle" . | nindent 6 }}
    resources:
      {{- include "headrace.resources" . | nindent 6 }}
    securityContext:
      {{- include "headrace.containerSecurity" . | nindent 6 }}
    volumeMounts:
      {{- include "headrace.configMounts" . | nindent 6 }}
      {{- include "headrace.modelMounts" . | nindent 6 }}
volumes:
  {{- include "headrace.configVolume" . | nindent 2 }}
  {{- include "headrace.modelVolumes" . | nindent 2 }}
{{- end }}
