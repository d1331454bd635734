// Command gitops asks the engines of Argo CD and Flux what they make of recorded jobs.
//
// It reads one JSON value a line on standard input and writes one JSON answer a line:
//
//	gitops verdicts ARGOCD_CM HEALTH_CHECKS     objects -> health and status by each engine
//	gitops actions ARGOCD_CM                    objects -> the actions that are offered, and what each makes of the object
//	gitops diff [KUBECONFIG]                    {"config": …, "live": …} -> whether each way of comparing finds a difference
//	gitops decode                               objects of Argo CD and Flux -> their kinds, read strictly by their own types
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

const longestLine = 4 << 20

// atEnd removes the copy of the kubeconfig that an engine has made.
var atEnd = func() {}

// answerer makes an answer of one line.
type answerer func(line []byte) (any, error)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gitops:", err)
		os.Exit(1)
	}
}

func run(words []string) error {
	answer, err := command(words)
	if err != nil {
		return err
	}
	defer atEnd()
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 64<<10), longestLine)
	out := json.NewEncoder(os.Stdout)
	for number := 1; lines.Scan(); number++ {
		made, err := answer(lines.Bytes())
		if err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		if err := out.Encode(made); err != nil {
			return err
		}
	}
	return lines.Err()
}

func command(words []string) (answerer, error) {
	switch {
	case len(words) == 3 && words[0] == "verdicts":
		return verdicts(words[1], words[2])
	case len(words) == 2 && words[0] == "actions":
		return actions(words[1])
	case len(words) == 1 && words[0] == "decode":
		return decode, nil
	case len(words) == 1 && words[0] == "diff":
		return differences("")
	case len(words) == 2 && words[0] == "diff":
		return differences(words[1])
	}
	return nil, fmt.Errorf("want verdicts ARGOCD_CM HEALTH_CHECKS, actions ARGOCD_CM, diff [KUBECONFIG] or decode, got %q", words)
}

func object(line []byte) (*unstructured.Unstructured, error) {
	made := &unstructured.Unstructured{}
	return made, made.UnmarshalJSON(line)
}
