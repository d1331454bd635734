package main

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	helm "github.com/fluxcd/helm-controller/api/v2"
	kustomize "github.com/fluxcd/kustomize-controller/api/v1"
	source "github.com/fluxcd/source-controller/api/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// kinds makes an empty object of each kind that an example may have, by apiVersion and kind.
var kinds = map[string]func() any{
	"argoproj.io/v1alpha1 Application":             func() any { return &v1alpha1.Application{} },
	"kustomize.toolkit.fluxcd.io/v1 Kustomization": func() any { return &kustomize.Kustomization{} },
	"source.toolkit.fluxcd.io/v1 GitRepository":    func() any { return &source.GitRepository{} },
	"source.toolkit.fluxcd.io/v1 OCIRepository":    func() any { return &source.OCIRepository{} },
	"helm.toolkit.fluxcd.io/v2 HelmRelease":        func() any { return &helm.HelmRelease{} },
}

// decode reads an object into its own Go type, and answers the kind; an unknown field is an error.
func decode(line []byte) (any, error) {
	var about metav1.TypeMeta
	if err := json.Unmarshal(line, &about); err != nil {
		return nil, err
	}
	kind := about.APIVersion + " " + about.Kind
	empty, known := kinds[kind]
	if !known {
		return nil, fmt.Errorf("%s is no kind that is known here", kind)
	}
	decoder := json.NewDecoder(bytes.NewReader(line))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(empty()); err != nil {
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	return kind, nil
}
