//! What `--tour` and `--check` say to the model. The model is small: it lists and tells, it does not know much.

pub(crate) const SHORT: &str = "List three colours.";

/// Sentences that a long prompt is made of. Each begins otherwise, so that no part of the text repeats.
const STORY: [&str; 24] = [
    "Early in the spring a young fox left the hills where it was born and followed the river down to the plain.",
    "Nobody had told it that the river was long, or that the towns beside it were full of dogs.",
    "On the first evening it met an old heron who stood in the shallows and looked at its own reflection.",
    "The heron asked where the fox was going, and the fox said that it was going to see where the water ends.",
    "Water does not end, said the heron, it only changes its name, and then it flew away without a sound.",
    "The next day brought rain, and the path along the bank turned into mud that held every footprint.",
    "Behind a mill the fox found a cat who slept on warm sacks and spoke only when she was fed.",
    "She told it about three bridges: one of stone, one of wood, and one that had been taken away by a flood.",
    "At the bridge of stone a boy was fishing, and he shared his bread because he had caught nothing anyway.",
    "The bridge of wood was guarded by two geese who could not agree on the price of crossing.",
    "While they argued the fox walked past them, and neither of them ever noticed.",
    "Where the third bridge had been there was a ferryman with a flat boat and a very long pole.",
    "He carried sheep in the morning, barrels at noon, and at night whatever stood on the bank and kept still.",
    "So the fox kept still, and it crossed the river under a moon that was nearly full.",
    "On the other side the land was flat, and the wind smelled of something that the fox had no word for.",
    "A hare explained that this was salt, and that it was best to keep away from it.",
    "But the fox had walked for nine days, and it did not want to turn round one hill too early.",
    "It slept in a barn beside a blind horse who had once pulled carts to the harbour every morning.",
    "The horse described the ships, the ropes, the shouting, and the bells that told the hours.",
    "When the sun rose they said goodbye, and the horse asked the fox to come back and tell the rest.",
    "Past the last dune the fox stopped, because there was suddenly nothing more to walk on.",
    "Everything in front of it moved, and none of it went anywhere, and it was louder than the mill.",
    "Far out a white sail leaned to one side like an ear that listens to something far away.",
    "The fox sat down in the sand, put its tail around its feet, and thought about what it would tell the horse.",
];

/// A prompt of about 26 tokens for each sentence, `sentences` of them, ending with a task.
pub(crate) fn long(sentences: usize) -> String {
    let story: Vec<&str> = STORY.into_iter().cycle().take(sentences).collect();
    format!(
        "Read this story.\n\n{}\n\nContinue the story.",
        story.join(" ")
    )
}

/// What a decode worker is kept busy with. They differ, so that none is answered from another's cache.
pub(crate) fn busy(number: usize) -> String {
    format!("Tell a long story about fox number {number}.")
}
