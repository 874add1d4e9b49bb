"""Reports that people look at: values -> one HTML file that needs nothing else and asks nobody for anything. Pure.

    html.py        elements; the one place where text becomes markup, and is escaped
    words.py       money, instants and spans as people read them
    axes.py        where ticks stand
    charts.py      what a chart of something over time, or a list of bars, is
    svg.py         charts -> inline SVG, once wide and once narrow
    page.py        the document: head, style, sections, tables
    cost.py        what fleets have cost: cost_view.py gathers it, cost_tables.py has the tables
    simulation.py  what a simulation found; ranges.py: amounts that vary
    style.py       its style sheet: light, dark, printed, narrow
"""
