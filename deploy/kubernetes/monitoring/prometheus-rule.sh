#!/usr/bin/env bash
# Prints deploy/prometheus' recording rules and alerts as PrometheusRules, for the Prometheus operator:
#
#   deploy/kubernetes/monitoring/prometheus-rule.sh | kubectl -n training apply -f -
#
#   --label NAME=VALUE   one that the operator's Prometheus looks for (kube-prometheus-stack: release=...)
set -euo pipefail

FOLDER=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly FOLDER
# shellcheck source=deploy/options.sh
. "$FOLDER/../../options.sh"

label=""

flag --label "NAME=VALUE" '[A-Za-z0-9./_-]+=[A-Za-z0-9._-]*'

# FILE: its groups are a PrometheusRule's spec.
print_rule() {
  cat <<END
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ballast-$(basename "$1" .yml)
  labels:
    app.kubernetes.io/name: ballast
END
  if [[ -n $label ]]; then echo "    ${label%%=*}: '${label#*=}'"; fi
  echo "spec:"
  sed 's/^\(.\)/  \1/' "$1"
}

parse_flags "$@"
print_rule "$FOLDER/../../prometheus/rules.yml"
print_rule "$FOLDER/../../prometheus/alerts.yml"
