"""How the API server is reached: in a cluster by the pod's service account, outside by a kubeconfig."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import aiohttp
import yaml
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client import Configuration
from kubernetes.aio.config.config_exception import ConfigException

from psjob_operator import __version__

AGENT = f"psjob-operator/{__version__}"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ConnectError(Exception):
    """There is no usable way to the API server; the text says what was looked for and what to do."""


async def configure(path: str | None, context: str | None = None) -> Configuration:
    """Read the kubeconfig at `path` (or $KUBECONFIG, ~/.kube/config), or the service account in a pod.

    `context` names one of the kubeconfig; None: its current one.

    Raises ConnectError.
    """
    found = Configuration()
    if context is None and in_cluster(path):
        try:
            kubeconfig.load_incluster_config(client_configuration=found)
        except ConfigException as error:
            raise ConnectError(f"the pod's service account cannot be used: {error}; mount its token, or give --kubeconfig") from error
        return found
    file = kubeconfig_path(path)
    if not any(Path(one).expanduser().is_file() for one in file.split(os.pathsep)):
        raise ConnectError(f"--kubeconfig: there is no file {file}; give --kubeconfig FILE, or run in a cluster")
    try:
        await kubeconfig.load_kube_config(config_file=file, context=context, client_configuration=found, persist_config=False)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        # The client says what is wrong with a file in as many ways as there are files.
        raise ConnectError(f"--kubeconfig {file} cannot be used ({' '.join(str(error).split())[:200]}); is it a kubeconfig?") from error
    return found


def in_cluster(path: str | None) -> bool:
    """Is the service account of this pod the way, since no kubeconfig was named?"""
    return path is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ


def own_namespace() -> str:
    """The namespace of the pod that this process runs in; empty outside a cluster."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""


def kubeconfig_path(path: str | None) -> str:
    """The kubeconfig that is read for `path`; $KUBECONFIG may list several, which are merged."""
    return path or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


async def session(configuration: Configuration, trace: aiohttp.TraceConfig) -> aiohttp.ClientSession:
    """A session of its own for kopf's watches, with the same credentials; `trace` sees each of its requests."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    headers = {"User-Agent": AGENT}
    token = await configuration.get_api_key_with_prefix("BearerToken")
    if token:
        headers["Authorization"] = token
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context), headers=headers, trace_configs=[trace], read_bufsize=2**21
    )
