"""Visualisation: pictures as SVG text (without a library), plans as text, and timelines as traces for Perfetto.

svg.py           colours of the light and the dark theme, frame, axis ticks, legend
chart.py         lines over steps: loss, seconds, bytes
timeline_svg.py  a step as boxes, predicted above measured; a schedule in abstract slots of time
plan_svg.py      seconds and bytes of the stages
plan_text.py     a plan in four lines, or as a table
chrome_trace.py  a timeline in the Trace Event Format
"""
