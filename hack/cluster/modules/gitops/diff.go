package main

import (
	"encoding/json"

	"github.com/argoproj/gitops-engine/pkg/diff"
	"github.com/argoproj/gitops-engine/pkg/utils/kube"
	"github.com/argoproj/gitops-engine/pkg/utils/tracing"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2/textlogger"
)

const manager = "argocd-controller"

type pair struct {
	Config *unstructured.Unstructured `json:"config"`
	Live   *unstructured.Unstructured `json:"live"`
}

// difference holds the two sides of the first way that finds one; both are empty where no way does.
type difference struct {
	Ways     []string        `json:"ways"`
	Modified []string        `json:"modified"`
	Live     json.RawMessage `json:"live,omitempty"`
	Wanted   json.RawMessage `json:"wanted,omitempty"`
}

// differences compares as Argo CD does: by three-way merge and, with a kubeconfig, by structured merge and by server-side apply too.
func differences(kubeconfig string) (answerer, error) {
	ways := map[string][]diff.Option{"threeWay": nil}
	order := []string{"threeWay"}
	if kubeconfig != "" {
		config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		if err != nil {
			return nil, err
		}
		log := textlogger.NewLogger(textlogger.NewConfig())
		tracer := tracing.NopTracer{}
		schema, parser, err := (&kube.KubectlCmd{Log: log, Tracer: tracer}).LoadOpenAPISchema(config)
		if err != nil {
			return nil, err
		}
		applier, remove, err := kube.ManageServerSideDiffDryRuns(config, schema, tracer, log, nil)
		if err != nil {
			return nil, err
		}
		atEnd = remove
		shared := []diff.Option{diff.WithGVKParser(parser), diff.WithManager(manager)}
		ways["structured"] = append(shared[:2:2], diff.WithStructuredMergeDiff(true))
		ways["serverSide"] = append(shared[:2:2], diff.WithServerSideDiff(true), diff.WithServerSideDryRunner(diff.NewK8sServerSideDryRunner(applier)))
		order = append(order, "structured", "serverSide")
	}
	return func(line []byte) (any, error) {
		var asked pair
		if err := json.Unmarshal(line, &asked); err != nil {
			return nil, err
		}
		found := difference{Ways: order, Modified: []string{}}
		for _, way := range order {
			made, err := diff.Diff(asked.Config.DeepCopy(), asked.Live.DeepCopy(), ways[way]...)
			if err != nil {
				return nil, err
			}
			if made.Modified {
				if len(found.Modified) == 0 {
					found.Live, found.Wanted = made.NormalizedLive, made.PredictedLive
				}
				found.Modified = append(found.Modified, way)
			}
		}
		return found, nil
	}, nil
}
