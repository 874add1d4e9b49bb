"""Reports for readers: values -> one self-contained HTML file without external requests. Pure.

    html.py        elements; the only place that turns text into markup, and escapes it
    axes.py        positions and labels of ticks
    charts.py      values of a chart over time, and of a list of bars
    svg.py         charts -> inline SVG, once wide and once narrow
    page.py        the document: head, style, sections, tables
    cost.py        cost of fleets: cost_view.py collects the data, cost_tables.py has the tables
    simulation.py  results of a simulation; ranges.py: amounts that vary
    style.py       the style sheet: light, dark, printed, narrow
"""
