"""``raypipe report RUN``: one HTML file about a run, for a browser without a network.

    run's folder  --run_facts.py-->  RunFacts  --page.py-->  charts and tables in one file, page.css and page.js inside
    metrics, events, plan,
    timeline, config

All charts are drawn when the file is written. The script only zooms, and shows numbers under the pointer and of a
clicked box; without it the page is complete.
"""
