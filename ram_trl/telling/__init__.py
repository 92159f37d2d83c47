"""What people read: reports, advice, tables, plots, model cards."""
