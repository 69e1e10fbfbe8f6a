"""The colours of charts."""

# Okabe and Ito's colours, which the colour-blind tell apart, and greys for what is not work.
BLUE, ORANGE, GREEN, RED = "#56B4E9", "#E69F00", "#009E73", "#D55E00"
NAVY, PINK, BLACK, YELLOW = "#0072B2", "#CC79A7", "#000000", "#F0E442"
COLOURS = (BLUE, ORANGE, GREEN, RED, NAVY, PINK, BLACK)
SAND, GREY, LIGHT, PALE = "#B8A58A", "#8C8C8C", "#CFCFCF", "#EDEDED"
