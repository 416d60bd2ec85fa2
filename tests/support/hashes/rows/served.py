def rows():
    return ()
