"""``raypipe report RUN``: one HTML file that says what a run did, for a browser without a network.

    run's folder  --read.py-->  RunFacts  --sections.py-->  charts and tables  --page.py-->  one file
    metrics, events, plan,                memory.py: bytes over a step              page.css, page.js inside
    timeline, config

Everything is drawn when the file is written; the script only zooms, shows numbers under the pointer and what was
clicked. Without it the page is whole.
"""
