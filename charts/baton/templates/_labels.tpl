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

{{/* NAME in namespace NAMESPACE of another release whose operator looks after all namespaces; nothing where there is none. */}}
{{- define "baton.otherOperator" -}}
{{- $own := printf "%s-operator-%s" .Release.Name .Release.Namespace -}}
{{- $other := "" -}}
{{- $bindings := lookup "rbac.authorization.k8s.io/v1" "ClusterRoleBinding" "" "" -}}
{{- range dig "items" list ($bindings | default dict) -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $account := first (.subjects | default (list dict)) -}}
{{- $ours := and (eq (get $labels "app.kubernetes.io/name") "baton-operator") (eq (get $labels "app.kubernetes.io/part-of") "baton") -}}
{{- /* Each operator has a binding for nodes, too, of another name. */ -}}
{{- $everywhere := eq .metadata.name (printf "%s-%s" (get $account "name") (get $account "namespace")) -}}
{{- if and $ours $everywhere (ne .metadata.name $own) -}}
{{- $other = printf "%s in namespace %s" (get $labels "app.kubernetes.io/instance") (get $account "namespace") -}}
{{- end -}}
{{- end -}}
{{- $other -}}
{{- end }}
