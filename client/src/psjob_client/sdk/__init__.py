"""The Python face: `psjob.Client`, the same verbs for this machine and for clusters, blocking and asyncio."""
