"""Reports: finished results as Markdown, on the terminal and as a page. They compute nothing."""
