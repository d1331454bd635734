"""Jobs as people have them, after the examples of Kubeflow's operators; short."""

PYTORCH_NCCL = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: dist-mnist-nccl, namespace: team-a, labels: {app: mnist}, creationTimestamp: null, uid: 5f1c}
spec:
  pytorchReplicaSpecs:
    Master: &one
      replicas: 1
      restartPolicy: OnFailure
      template:
        metadata: {annotations: {sidecar.istio.io/inject: "false"}}
        spec:
          containers:
          - name: pytorch
            image: registry.example.com/dist_mnist:latest
            args: ["--backend", "nccl"]
            ports: [{name: pytorchjob-port, containerPort: 23456}]
            resources: {limits: {nvidia.com/gpu: 1}}
    Worker: {<<: *one, replicas: 3}
"""
PYTORCH_ELASTIC = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: elastic-imagenet}
spec:
  nprocPerNode: "4"
  elasticPolicy: {rdzvBackend: c10d, minReplicas: 1, maxReplicas: 3, maxRestarts: 100, metrics: [{type: Resource}]}
  runPolicy:
    cleanPodPolicy: None
    ttlSecondsAfterFinished: 600
    suspend: true
    schedulingPolicy: {minAvailable: 2, queue: default, priorityClass: high}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: ExitCode
      template:
        spec:
          restartPolicy: OnFailure
          nodeSelector: {pool: gpu}
          containers:
          - name: pytorch
            image: registry.example.com/imagenet:1
            resources: {requests: {cpu: 6, memory: 10Gi}, limits: {nvidia.com/gpu: 4}}
            env: [{name: LOGLEVEL, value: DEBUG}, {name: MASTER_ADDR, value: here}, {name: EPOCHS, value: 3}]
            command: [python, -m, torch.distributed.run, --rdzv_backend=c10d, ./imagenet.py, "--arch=resnet18"]
          - {name: sidecar, image: fluentbit}
"""
PYTORCH_SHELL = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {generateName: Fine_Tune.}
spec:
  pytorchReplicaSpecs:
    Master:
      template:
        spec:
          hostNetwork: true
          volumes: [{name: psjob-data, persistentVolumeClaim: {claimName: data}}]
          containers:
          - name: pytorch
            image: registry.example.com/tune:1
            command: [bash, -c, "torchrun --nproc_per_node 2 --tee 3 tune.py --lr 0.1"]
            volumeMounts: [{name: psjob-data, mountPath: /data}, {name: psjob-data, mountPath: /psjob/x}]
            resources: {limits: {nvidia.com/gpu: 2, memory: 3Gi, cpu: 3}}
"""
TF_MNIST = """
apiVersion: kubeflow.org/v1
kind: TFJob
metadata: {name: dist-mnist-for-e2e-test}
spec:
  cleanPodPolicy: All
  backoffLimit: 3
  tfReplicaSpecs:
    PS:
      replicas: 2
      restartPolicy: Never
      template:
        spec:
          tolerations: [{key: spot, operator: Exists}]
          containers:
          - name: tensorflow
            image: registry.example.com/tf-mnist:1.0
            command: [python, ps.py]
            resources: {requests: {cpu: 2}, limits: {nvidia.com/gpu: 1}}
    Chief: {replicas: 1, template: {spec: {containers: [{name: tensorflow, image: registry.example.com/tf-mnist:1.0}]}}}
    Worker:
      replicas: 4
      restartPolicy: Never
      template: {spec: {containers: [{name: tensorflow, image: registry.example.com/tf-mnist:1.0}]}}
    Evaluator: {replicas: 1, template: {spec: {containers: [{name: tensorflow, image: registry.example.com/tf-mnist:1.0}]}}}
"""
MX_GPU = """
apiVersion: kubeflow.org/v1
kind: MXJob
metadata: {name: mxnet-job}
spec:
  jobMode: MXTrain
  mxReplicaSpecs:
    Scheduler: {replicas: 1, restartPolicy: Never, template: {spec: {containers: [{name: mxnet, image: mx:gpu}]}}}
    Server: {replicas: 2, restartPolicy: Never, template: {spec: {containers: [{name: mxnet, image: mx:gpu}]}}}
    Worker:
      replicas: 3
      restartPolicy: Never
      template:
        spec:
          containers:
          - name: mxnet
            image: registry.example.com/mx:gpu
            command: [python]
            args: [/example/train_mnist.py, --kv-store, dist_device_sync, --gpus, "0"]
            resources: {limits: {nvidia.com/gpu: 1}}
"""
TRAIN_V2 = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: pytorch-multi-node}
spec:
  runtimeRef: {name: torch-distributed}
  initializer: {dataset: {storageUri: "hf://imdb"}}
  trainer:
    image: registry.example.com/mnist:2
    numNodes: 2
    numProcPerNode: 2
    command: [torchrun, /workspace/mnist.py, --epochs=1]
    resourcesPerNode: {requests: {cpu: 4, memory: 8Gi}, limits: {nvidia.com/gpu: 2}}
  runtimePatches: [{manager: me}]
"""
SOURCES = {"nccl": PYTORCH_NCCL, "elastic": PYTORCH_ELASTIC, "shell": PYTORCH_SHELL, "tf": TF_MNIST, "mx": MX_GPU, "v2": TRAIN_V2}


DDP = '''"""Trains."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    """Join the others."""
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo")


def main():
    setup()
    rank = dist.get_rank()
    # The sampler slices.
    sampler = DistributedSampler(DATA, shuffle=True)
    loader = DataLoader(
        DATA,
        batch_size=8,
        sampler=sampler,  # an order of its own
    )
    model = DDP(Net().to("cpu"), device_ids=None)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)   # kept   as it is
    for epoch in range(1, 4):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = (model(x) - y).square().mean()
            opt.zero_grad(); loss.backward(); opt.step()
        if rank == 0:
            print(epoch, loss.item(), len(loader))
    torch.save(model.module.state_dict(), "w.pt")
    dist.destroy_process_group()


main()
'''
