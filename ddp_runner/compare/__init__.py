"""Compare runs, as tables, plots and a report. The package never imports torch."""
