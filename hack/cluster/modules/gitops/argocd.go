package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/argoproj/argo-cd/v3/util/lua"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const customization = "resource.customizations."

// overrides reads the keys of the ConfigMap argocd-cm that a user pastes, as Argo CD names them.
func overrides(file string) (lua.ResourceHealthOverrides, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var settings corev1.ConfigMap
	if err := yaml.UnmarshalStrict(text, &settings); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	found := lua.ResourceHealthOverrides{}
	for key, value := range settings.Data {
		what, kind, _ := strings.Cut(strings.TrimPrefix(key, customization), ".")
		kind = strings.Replace(kind, "_", "/", 1)
		one := found[kind]
		switch {
		case !strings.HasPrefix(key, customization):
			return nil, fmt.Errorf("%s: %s is no customization of a resource", file, key)
		case what == "health":
			one.HealthLua = value
		case what == "actions":
			one.Actions = value
		case what == "knownTypeFields":
			if err := yaml.UnmarshalStrict([]byte(value), &one.KnownTypeFields); err != nil {
				return nil, fmt.Errorf("%s: %s: %w", file, key, err)
			}
		default:
			return nil, fmt.Errorf("%s: %s is no key that is known here", file, key)
		}
		found[kind] = one
	}
	return found, nil
}

// actions offers what discovery offers, and runs each action that is not disabled.
func actions(settings string) (answerer, error) {
	found, err := overrides(settings)
	if err != nil {
		return nil, err
	}
	machine := lua.VM{ResourceOverrides: map[string]v1alpha1.ResourceOverride(found)}
	return func(line []byte) (any, error) {
		live, err := object(line)
		if err != nil {
			return nil, err
		}
		scripts, err := machine.GetResourceActionDiscovery(live)
		if err != nil {
			return nil, err
		}
		offered, err := machine.ExecuteResourceActionDiscovery(live, scripts)
		if err != nil {
			return nil, err
		}
		made := map[string]any{}
		for _, action := range offered {
			if action.Disabled {
				made[action.Name] = nil
				continue
			}
			definition, err := machine.GetResourceAction(live, action.Name)
			if err != nil {
				return nil, err
			}
			impacted, err := machine.ExecuteResourceAction(live, definition.ActionLua, nil)
			if err != nil {
				return nil, fmt.Errorf("action %s: %w", action.Name, err)
			}
			if len(impacted) != 1 || impacted[0].K8SOperation != lua.PatchOperation {
				return nil, fmt.Errorf("action %s does not patch one object", action.Name)
			}
			made[action.Name] = impacted[0].UnstructuredObj.Object
		}
		return made, nil
	}, nil
}
