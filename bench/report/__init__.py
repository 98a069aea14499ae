"""What a reader gets: `publish.publish` writes tables and plots, `frame.tidy` gives the numbers behind them."""
