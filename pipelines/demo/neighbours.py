"""The nearest thing in the demo world for common words outside it. Data only."""

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
    "big": "giant gigantic enormous massive tall wide fat",
    "two": "couple both double twin",
    "three": "triple several few",
    "four": "five six seven eight nine ten many lots dozen multiple",
    # shapes
    "circle": "sphere globe planet earth bubble coin button bead point bulb apple cherry tomato "
    "pizza plate face emoji smiley head egg wheel clock pumpkin berry grape marble spot bread "
    "cake cookie ⚪ ⚫ ● ○ 😀 🙂 😊 🌍 🌎 🌏",
    "ring": "doughnut bracelet torus bagel tire tyre halo loop band circlet",
    "square": "cube block tile window present gift dice die chessboard robot tv screen ■ □ ◼ ◻ 🎁",
    "rectangle": "brick door book card flag phone table bed plank stick pencil laptop bottle "
    "pillar tower skyscraper strip banner desk sofa shelf street road",
    "triangle": "pyramid cone mountain hill arrow tent wedge volcano peak iceberg carrot hat "
    "rocket spaceship ▲ △ 🔺",
    "star": "asterisk sparkle starfish comet snowflake spark firework asteroid ★ ☆ ⭐ 🌟 ✨",
    "diamond": "kite gem jewel crystal lozenge gemstone ◆ ◇ 💎",
    "heart": "love valentine person man woman boy girl child baby human people king queen princess "
    "witch wizard knight pirate astronaut strawberry "
    "♥ ❤ 💙 💚 💛 💜 🧡",
    "cross": "x sword windmill propeller crossroads sign airplane plane drone + ✝ ❌",
    "hexagon": "pentagon octagon polygon honeycomb nut bolt turtle",
    "moon": "banana croissant sickle lunar 🌙 🌛 🌜",
    "oval": "lens potato melon rugby balloon pill bean leaf feather",
    "red circle": "🔴",
    "blue circle": "🔵",
    "green circle": "🟢",
    "yellow circle": "🟡",
    # pictures
    "house": "building castle church barn hut cabin school shop garage palace temple villa shed "
    "car bus truck train van city town village 🏠 🏡",
    "tree": "plant oak palm bush cactus shrub fir broccoli 🌲 🌳 🌴",
    "flower": "tulip daisy sunflower lily lotus orchid bouquet poppy rosebud mushroom "
    "🌸 🌷 🌹 🌻 🌼",
    "sun": "sunshine sunlight lamp fire lightbulb ☀ 🌞",
    "cloud": "smoke fog sheep cotton mist ☁",
    "boat": "canoe sailboat yacht vessel submarine raft ferry ⛵ 🚢 🚤",
    "fish": "shark whale dolphin goldfish animal cat dog kitten puppy bird horse cow pig lion "
    "tiger elephant bear rabbit mouse fox wolf duck chicken frog snake monkey dragon unicorn bee "
    "butterfly zebra giraffe penguin owl eagle parrot deer goat hamster squirrel "
    "🐟 🐠 🐱 🐈 🐶 🐕",
    # backgrounds
    "meadow": "field park garden lawn forest countryside farm prairie valley jungle",
    "beach": "desert shore coast island dune",
    "sea": "lake river pond waves pool harbour harbor",
    "night": "space galaxy universe evening cosmos nighttime midnight",
    "background": "surface environment surrounding",
    "wall": "floor",
    # places
    "middle": "mid central centered centred halfway",
    "above": "atop upon",
    "beside": "alongside adjacent between",
    "inside": "into",
    "and": "&",
    "stripes": "lines stripy stripey",
}

NEIGHBOURS: dict[str, str] = {
    word: neighbour for neighbour, words in _BY_NEIGHBOUR.items() for word in words.split()
}

_WITHOUT_CONTENT = (
    # the grammar of a request
    "i you he she they we my your his her its it this that these those which who whose "
    "want would like can could should some any very really just also so too be are am was were "
    "will there here has have having do does not no but or if then than for as give "
    "get let us something anything everything what where when while during after before up down "
    "out off around away together "
    # kinds of pictures
    "photograph photography sketch style styled art artwork artistic render "
    "rendering rendered digital cartoon comic anime manga minimal minimalist minimalistic vector "
    "icon logo clip clipart cgi pixel pixelart watercolor watercolour oil acrylic ink portrait "
    "closeup shot view scene composition wallpaper poster sticker texture pattern film movie "
    "graphic design close "
    # praise and technique
    "high higher highest low quality resolution res detail details detailed intricate hd uhd hdr "
    "fhd ultra hyper super realistic realism photorealistic photorealism photoreal hyperrealistic "
    "real masterpiece best better good great amazing awesome stunning gorgeous elegant epic cool "
    "fantastic breathtaking perfectly cinematic dramatic aesthetic atmospheric moody professional "
    "award winning trending artstation deviantart unreal engine octane blender raytracing "
    "raytraced lighting lit studio bokeh depth focus focused sharp crisp clear clean vivid "
    "vibrant saturated smooth matte glossy modern futuristic vintage retro abstract surreal "
    "fantasy magical mystical ancient old new young fresh happy sad angry funny scary adorable "
    "majestic famous popular unique special interesting calm peaceful serene tranquil dreamy "
    "whimsical random nsfw sfw shaped coloured colored "
    # what things do
    "sitting standing running walking flying floating jumping sleeping swimming eating looking "
    "smiling glowing sparkling shining burning spinning growing falling sailing hanging wearing "
    "holding "
)
WITHOUT_CONTENT = frozenset(_WITHOUT_CONTENT.split())
"""Words that say nothing about what a picture of this world shows: left out, never made a shape."""
