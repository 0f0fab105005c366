"""Progress bars, metric files, timings, the final table and the HTML report."""
