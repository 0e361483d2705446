{{/* Labels that select the pods of a part; give a list of the chart's context and the part's name. */}}
{{- define "baton.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: baton-{{ index . 1 }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- end }}

{{/* Labels of everything of a part. */}}
{{- define "baton.labels" -}}
{{- $root := index . 0 -}}
{{ include "baton.selector" . }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* name=nodeLabel,… as the operator and the router take it. */}}
{{- define "baton.levels" -}}
{{- $levels := list -}}
{{- range .Values.topologyLevels -}}
{{- $levels = append $levels (printf "%s=%s" .name .nodeLabel) -}}
{{- end -}}
{{- join "," $levels -}}
{{- end }}

{{/* What a container of Baton may do: nothing that needs a right. */}}
{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Where an author wants the pods; give the values of a part. */}}
{{- define "baton.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* True where the chart is to make a Secret: it is not there, or this release made it. Give a list of context and name. */}}
{{- define "baton.makesSecret" -}}
{{- $root := index . 0 -}}
{{- $there := lookup "v1" "Secret" $root.Release.Namespace (index . 1) -}}
{{- if not $there -}}true
{{- else if eq (dig "metadata" "annotations" "meta.helm.sh/release-name" "" $there) $root.Release.Name -}}true
{{- end -}}
{{- end }}

{{/* Another release's operator that looks after a namespace which this one would, in words; nothing where there is none. */}}
{{- define "baton.otherOperator" -}}
{{- $own := printf "%s-operator-%s" .Release.Name .Release.Namespace -}}
{{- $watched := .Values.operator.watchNamespace -}}
{{- $other := "" -}}
{{- range $kind := list "ClusterRoleBinding" "RoleBinding" -}}
{{- range dig "items" list (lookup "rbac.authorization.k8s.io/v1" $kind "" "" | default dict) -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $account := first (.subjects | default (list dict)) -}}
{{- $ours := and (eq (get $labels "app.kubernetes.io/name") "baton-operator") (eq (get $labels "app.kubernetes.io/part-of") "baton") -}}
{{- /* Each operator has bindings for nodes and for its lease, too, of other names. */ -}}
{{- $ofPools := eq .metadata.name (printf "%s-%s" (get $account "name") (get $account "namespace")) -}}
{{- $there := .metadata.namespace -}}
{{- $overlaps := or (not $there) (not $watched) (eq ($there | default "") ($watched | default "")) -}}
{{- if and $ours $ofPools $overlaps (ne .metadata.name $own) -}}
{{- $after := empty $there | ternary "all namespaces" (printf "namespace %s" $there) -}}
{{- $other = printf "release %s in namespace %s looks after %s" (get $labels "app.kubernetes.io/instance") (get $account "namespace") $after -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $other -}}
{{- end }}
