"""Pictures as SVG text, without a library: they open anywhere, and follow the light or dark theme of the reader.

    theme.py      colours of both themes, the frame of a picture
    axis.py       ticks at round numbers, units that fit
    chart.py      lines over steps                   loss, seconds, bytes
    timeline.py   what ran when, links below         predicted above measured
    schedule.py   a schedule in slots of time
    plan.py       the stages' seconds and bytes

What is drawn does not import its picture's module, except inside ``_repr_html_``, which notebooks call.
"""
