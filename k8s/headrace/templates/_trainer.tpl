{{/* The trainer's pod: the same for a StatefulSet and for each host of a JobSet. Takes a component. */}}

{{- define "headrace.trainerPod" -}}
{{- include "headrace.podSpec" . }}
containers:
  - name: trainer
    image: {{ include "headrace.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args:
      - --config=/etc/headrace/run.yaml
      - --listen=0.0.0.0:50051
      - --bulk-listen=0.0.0.0:50053
      - --health-listen=0.0.0.0:50052
      - --metrics-listen=0.0.0.0:9090
      {{- if eq (include "headrace.trainerKind" .root) "StatefulSet" }}
      - --stay
      {{- end }}
    env:
      {{- include "headrace.env" . | nindent 6 }}
      {{- include "headrace.redisEnv" .root | nindent 6 }}
      - name: JAX_COMPILATION_CACHE_DIR
        value: /var/cache/headrace
      {{- if gt (default 1 .values.tpu.slices | int) 1 }}
      {{- include "headrace.multisliceEnv" . | nindent 6 }}
      {{- end }}
    ports:
      - name: grpc
        containerPort: 50051
      - name: bulk
        containerPort: 50053
      - name: health
        containerPort: 50052
      - name: metrics
        containerPort: 9090
      {{- if .values.tpu }}
      - name: tpu
        containerPort: 8471
      - name: coordinator
        containerPort: 8080
      {{- end }}
    {{- if .everyHostServes }}
    {{- include "headrace.grpcProbes" . | nindent 4 }}
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

{{/* JobSet tells a pod its slice in annotations, libtpu reads variables. */}}
{{- define "headrace.multisliceEnv" -}}
- name: MEGASCALE_NUM_SLICES
  valueFrom:
    fieldRef:
      fieldPath: metadata.annotations['jobset.sigs.k8s.io/global-replicas']
- name: MEGASCALE_SLICE_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.annotations['jobset.sigs.k8s.io/job-global-index']
- name: MEGASCALE_COORDINATOR_ADDRESS
  valueFrom:
    fieldRef:
      fieldPath: metadata.annotations['jobset.sigs.k8s.io/coordinator']
{{- end }}
