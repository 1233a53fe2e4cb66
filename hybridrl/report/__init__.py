"""``report.html``: one page that says what a run did, made from what its folder holds.

``python -m hybridrl.report RUN_FOLDER`` makes it for a running, finished or broken run; a run makes
its own at the end. Needs the folder alone: neither torch nor Ray nor a network.
"""
