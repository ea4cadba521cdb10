"""Local web page that shows a run while it trains: `status RUN --live`."""
