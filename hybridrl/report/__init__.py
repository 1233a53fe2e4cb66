"""``report.html``: one page about a run, made from the files of its folder.

``python -m hybridrl.report RUN_FOLDER`` makes it for a running, finished or failed run; a run makes
its own at the end. It needs the folder alone: neither torch nor Ray nor a network.
"""
