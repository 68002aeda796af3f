"""What shows runs.

The page of `report` and `view`, in the order in which to read it:
    run_data     one run, as its own files tell it: what figures and words are made of
    figures      (a folder) one function a figure, and the table of them
    in_words     the summary at the head of a page
    reasons      why an update was accepted, shrunk, rejected or skipped
    seeds        several runs: which differ in their seed alone, and who is better
    sample       which transcripts a report takes along
    page         the page as data, and the HTML file; page.js renders it and page.css has its colours
    view_server  the local server of `view`
"""
