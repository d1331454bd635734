// What Velero needs of a cloud, made of folders: a store of objects, and snapshots of local volumes. Velero runs it as a plug-in.
package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/vmware-tanzu/velero/pkg/plugin/framework"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

type folder struct{ root string }

func (f *folder) Init(config map[string]string) error {
	f.root = config["root"]
	if f.root == "" {
		return errors.New("the backup storage location's config needs root, a folder")
	}
	return nil
}

func (f *folder) path(bucket, key string) string {
	return filepath.Join(f.root, bucket, filepath.FromSlash(key))
}

func (f *folder) PutObject(bucket, key string, body io.Reader) error {
	path := f.path(bucket, key)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, body)
	return errors.Join(err, file.Close())
}

func (f *folder) ObjectExists(bucket, key string) (bool, error) {
	_, err := os.Stat(f.path(bucket, key))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func (f *folder) GetObject(bucket, key string) (io.ReadCloser, error) {
	return os.Open(f.path(bucket, key))
}

func (f *folder) ListObjects(bucket, prefix string) ([]string, error) {
	base := filepath.Join(f.root, bucket)
	var keys []string
	err := filepath.WalkDir(base, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		key, err := filepath.Rel(base, path)
		if key = filepath.ToSlash(key); err == nil && strings.HasPrefix(key, prefix) {
			keys = append(keys, key)
		}
		return err
	})
	return keys, err
}

func (f *folder) ListCommonPrefixes(bucket, prefix, delimiter string) ([]string, error) {
	keys, err := f.ListObjects(bucket, prefix)
	var found []string
	seen := map[string]bool{}
	for _, key := range keys {
		if head, _, cut := strings.Cut(key[len(prefix):], delimiter); cut && !seen[head] {
			seen[head] = true
			found = append(found, prefix+head+delimiter)
		}
	}
	return found, err
}

func (f *folder) DeleteObject(bucket, key string) error { return os.Remove(f.path(bucket, key)) }

func (f *folder) CreateSignedURL(bucket, key string, ttl time.Duration) (string, error) {
	return "", errors.New("a folder has no URL")
}

// volumes are folders of this machine; a snapshot is a copy of one, file by file.
type volumes struct{ root string }

func (v *volumes) Init(config map[string]string) error {
	v.root = config["root"]
	if v.root == "" {
		return errors.New("the volume snapshot location's config needs root, a folder")
	}
	return os.MkdirAll(v.root, 0o755)
}

func (v *volumes) GetVolumeID(pv runtime.Unstructured) (string, error) {
	path, _, err := unstructured.NestedString(pv.UnstructuredContent(), "spec", "local", "path")
	return path, err
}

func (v *volumes) SetVolumeID(pv runtime.Unstructured, volumeID string) (runtime.Unstructured, error) {
	content := pv.UnstructuredContent()
	err := unstructured.SetNestedField(content, volumeID, "spec", "local", "path")
	pv.SetUnstructuredContent(content)
	return pv, err
}

func (v *volumes) GetVolumeInfo(volumeID, volumeAZ string) (string, *int64, error) {
	return "folder", nil, nil
}

func (v *volumes) CreateSnapshot(volumeID, volumeAZ string, tags map[string]string) (string, error) {
	name := "snapshot-" + strconv.FormatInt(time.Now().UnixNano(), 10)
	return name, copied(volumeID, filepath.Join(v.root, name))
}

func (v *volumes) CreateVolumeFromSnapshot(snapshotID, volumeType, volumeAZ string, iops *int64) (string, error) {
	path := filepath.Join(v.root, "of-"+snapshotID+"-"+strconv.FormatInt(time.Now().UnixNano(), 10))
	return path, copied(filepath.Join(v.root, snapshotID), path)
}

func (v *volumes) DeleteSnapshot(snapshotID string) error {
	return os.RemoveAll(filepath.Join(v.root, snapshotID))
}

func copied(from, to string) error {
	said, err := exec.Command("cp", "-a", from, to).CombinedOutput()
	if err != nil {
		return errors.New(string(said))
	}
	return nil
}

func main() {
	store := func(logrus.FieldLogger) (any, error) { return &folder{}, nil }
	snapshots := func(logrus.FieldLogger) (any, error) { return &volumes{}, nil }
	framework.NewServer().
		RegisterObjectStore("psjob.dev/folder", store).
		RegisterVolumeSnapshotter("psjob.dev/folder", snapshots).
		Serve()
}
