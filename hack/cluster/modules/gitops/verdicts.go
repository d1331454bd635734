package main

import (
	"context"
	"fmt"
	"os"

	"github.com/argoproj/gitops-engine/pkg/health"
	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	"sigs.k8s.io/yaml"
)

// verdict is what the engines say of one object.
type verdict struct {
	Argo        string `json:"argo"`
	ArgoMessage string `json:"argoMessage"`
	Flux        string `json:"flux"`
	Kstatus     string `json:"kstatus"`
}

// verdicts asks all engines. healthChecks is a YAML list, as in spec.healthCheckExprs of a Kustomization.
func verdicts(settings, healthChecks string) (answerer, error) {
	argo, err := overrides(settings)
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(healthChecks)
	if err != nil {
		return nil, err
	}
	var checks []kustomize.CustomHealthCheck
	if err := yaml.UnmarshalStrict(text, &checks); err != nil {
		return nil, fmt.Errorf("%s: %w", healthChecks, err)
	}
	if len(checks) != 1 {
		return nil, fmt.Errorf("%s: want one health check, got %d", healthChecks, len(checks))
	}
	flux, err := cel.NewStatusEvaluator(&checks[0].HealthCheckExpressions)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", healthChecks, err)
	}
	return func(line []byte) (any, error) {
		live, err := object(line)
		if err != nil {
			return nil, err
		}
		said, err := health.GetResourceHealth(live, argo)
		if err != nil {
			return nil, err
		}
		if said == nil {
			return nil, fmt.Errorf("Argo CD has no health for %s", live.GroupVersionKind())
		}
		expressed, err := flux.Evaluate(context.Background(), live)
		if err != nil {
			return nil, err
		}
		computed, err := status.Compute(live)
		if err != nil {
			return nil, err
		}
		return verdict{string(said.Status), said.Message, string(expressed.Status), string(computed.Status)}, nil
	}, nil
}
