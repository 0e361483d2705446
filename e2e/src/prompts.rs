//! Texts of known kinds: short, long, with a prefix in common, with none.

/// Sentences that a small model reads easily; about fifteen tokens each.
const SENTENCES: [&str; 12] = [
    "The ferry left the harbour before sunrise and carried forty people to the island.",
    "A gardener had planted three rows of beans beside the old brick wall.",
    "Every morning the baker counted the loaves and wrote the number in a green book.",
    "On the hill above the town stood a small observatory with a copper roof.",
    "The river was low that summer and children walked across it on flat stones.",
    "Two engineers argued about the bridge until the lamps were lit.",
    "Nobody in the village remembered who had built the clock, or why it ran backwards.",
    "The librarian kept maps of places that had changed their names many times.",
    "In winter the train came once a week and brought letters, flour and oil.",
    "A painter rented the attic and covered its window with yellow paper.",
    "The dog slept under the table while the musicians tuned their instruments.",
    "At noon the market closed and the square was quiet until the bells rang.",
];

/// Sentences one after the other, beginning anywhere in the list and going round; `place` makes texts differ from their first token.
pub fn story(place: usize, sentences: usize) -> String {
    (0..sentences)
        .map(|index| SENTENCES[(place + index * (1 + place % 5 * 2)) % SENTENCES.len()])
        .collect::<Vec<_>>()
        .join(" ")
}

/// Twenty prompts from about 10 to about 600 tokens. Some begin alike: by a little, by most, by all but the end.
pub fn twenty() -> Vec<String> {
    let long = story(0, 30);
    let middle = story(3, 9);
    let mut prompts: Vec<String> = [
        "List three colours that you can see in a garden.",
        "Write a short poem about the sea and the wind.",
        "Continue the story: once upon a time there was",
        "The capital of France is a city that is known for",
        "Name two animals that live in the forest near us.",
        "1, 2, 3, 4, 5, 6,",
    ]
    .map(str::to_owned)
    .to_vec();
    for (sentences, end) in [(2, "Then"), (4, "After that"), (6, "Suddenly")] {
        prompts.push(format!("{} {end}", story(sentences, sentences)));
    }
    for end in [
        "In short:",
        "The next day",
        "What the painter saw was",
        "What the painter saw was a",
    ] {
        prompts.push(format!("{middle} {end}"));
    }
    prompts.push(format!("{long} {} To sum up,", story(5, 8)));
    for end in ["The moral is", "Later that year", "The moral is that"] {
        prompts.push(format!("{long} {end}"));
    }
    prompts.push(format!("{} Then", story(7, 12)));
    prompts.push(format!("{} And so", story(9, 16)));
    prompts.push(story(11, 3));
    prompts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_twenty_and_no_two_are_equal() {
        let prompts = twenty();
        let distinct: std::collections::BTreeSet<_> = prompts.iter().collect();
        assert_eq!((prompts.len(), distinct.len()), (20, 20));
    }

    #[test]
    fn stories_at_different_places_differ_at_once() {
        assert_ne!(story(1, 4).as_bytes()[..8], story(2, 4).as_bytes()[..8]);
    }
}
