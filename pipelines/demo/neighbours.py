"""The nearest thing in the demo world for common words from outside it. Data only."""

from __future__ import annotations

_BY_NEIGHBOUR: dict[str, str] = {
    # colours
    "dark blue": "navy indigo midnight sapphire",
    "cyan": "teal azure aquamarine",
    "light blue": "skyblue icy",
    "dark red": "maroon burgundy wine ruby",
    "pink": "magenta fuchsia salmon blush peach coral",
    "light purple": "lavender lilac mauve",
    "purple": "plum amethyst",
    "light green": "lime mint pistachio",
    "dark green": "olive jade pine mossy",
    "light brown": "beige tan khaki sandy",
    "dark brown": "coffee wooden mahogany",
    "brown": "bronze copper rusty sepia",
    "orange": "amber apricot ginger",
    "yellow": "gold mustard blond blonde cream ivory",
    "white": "pale colorless colourless bone pearl",
    "black": "ebony inky coal",
    "gray": "ash metallic steel slate stone chrome",
    "dark": "deep gloomy dim",
    "light": "pastel soft",
    # sizes and numbers
    "small": "mini miniature short thin minuscule teeny wee",
    "big": "giant gigantic enormous massive tall wide fat great",
    "two": "couple both double twin",
    "three": "triple several few",
    "four": "five six seven eight nine ten many lots dozen multiple",
    # shapes
    "circle": "sphere globe planet earth bubble coin button bead point bulb apple cherry "
    "tomato pizza plate face emoji smiley head egg wheel clock pumpkin berry grape marble spot",
    "ring": "doughnut bracelet torus bagel tire tyre halo loop band circlet",
    "square": "cube block tile window present gift dice die chessboard pixel robot tv screen",
    "rectangle": "brick door book card flag phone table bed plank stick pencil laptop "
    "bottle pillar tower skyscraper strip banner",
    "triangle": "pyramid cone mountain hill arrow tent wedge volcano peak iceberg carrot",
    "star": "asterisk sparkle starfish comet snowflake spark firework asteroid",
    "diamond": "kite gem jewel crystal lozenge gemstone",
    "heart": "love valentine person man woman boy girl child baby human people king queen princess",
    "cross": "x sword windmill propeller crossroads sign airplane plane drone",
    "hexagon": "pentagon octagon polygon honeycomb nut bolt turtle",
    "moon": "banana croissant sickle lunar",
    "oval": "lens potato melon rugby balloon pill bean leaf feather",
    # pictures
    "house": "building castle church barn hut cabin school shop garage palace temple villa shed "
    "car bus truck train van",
    "tree": "plant oak palm bush cactus shrub fir broccoli",
    "flower": "tulip daisy sunflower lily lotus orchid bouquet poppy rosebud mushroom",
    "sun": "sunshine sunlight lamp fire lightbulb",
    "cloud": "smoke fog sheep cotton mist",
    "boat": "canoe sailboat yacht vessel submarine raft ferry",
    "fish": "shark whale dolphin goldfish animal cat dog kitten puppy bird horse cow pig lion "
    "tiger elephant bear rabbit mouse fox wolf duck chicken frog snake monkey dragon unicorn bee "
    "butterfly",
    # backgrounds
    "meadow": "field park garden lawn forest countryside farm prairie valley jungle",
    "beach": "desert shore coast island dune",
    "sea": "lake river pond waves pool harbour harbor",
    "night": "space galaxy universe evening cosmos nighttime midnight",
    "background": "wallpaper surface environment surrounding",
    "wall": "floor",
    # places
    "middle": "mid central centered centred halfway",
    "above": "atop upon",
    "beside": "alongside close adjacent between",
    "inside": "into",
    "stripes": "lines stripy stripey",
}

NEIGHBOURS: dict[str, str] = {
    word: neighbour for neighbour, words in _BY_NEIGHBOUR.items() for word in words.split()
}

_QUIET_WORDS = (
    "i you we my your it its this that these those which who please want would like can could "
    "some any very really just also so be are am was there here has have having to for from as "
    "image photograph picture drawing sketch photo style art artwork render rendering digital "
    "high quality detailed highly ultra hd realistic cartoon minimal minimalist vector icon logo "
    "clip clipart but then give get let us"
)
QUIET = frozenset(_QUIET_WORDS.split())
"""Words that say nothing about the picture: left out without a note."""
