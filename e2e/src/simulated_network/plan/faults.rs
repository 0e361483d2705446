//! What goes wrong, and when: never two things at once on one link, so that each ends as it began.

use baton_placement::rng::Rng;

use crate::simulated_network::ROUTER;

/// Faults begin within this, milliseconds.
const BEGIN: usize = 4_500;
/// The longest that one lasts.
const LONGEST: usize = 4_000;

/// Something that goes wrong for a while.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Milliseconds from when all workers are ready.
    pub at: u64,
    pub lasts: u64,
    pub action: Action,
}

/// What goes wrong. Hosts by name.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Nothing passes between two hosts.
    Cut(String, String),
    /// Nothing passes from the first to the second.
    CutOneWay(String, String),
    /// What is sent arrives when it is over.
    Hold(String, String),
    /// Each message takes up to so many milliseconds.
    Slow(String, String, u64),
    /// So many messages of a hundred are lost, and the link with them for a while.
    Lossy(String, String, u64),
    /// A host hears and is heard by nobody until it is over, but goes on: the rest takes it for frozen.
    Freeze(String),
    /// The process dies: connections are reset. It is started again when it is over.
    Kill(String),
    /// The machine dies: nobody is told.
    Vanish(String),
}

impl Action {
    /// All words, in the order of the kinds.
    pub const WORDS: [&'static str; 8] = [
        "cut",
        "cut one way",
        "hold",
        "slow",
        "lossy",
        "freeze",
        "kill",
        "vanish",
    ];

    pub fn word(&self) -> &'static str {
        Self::WORDS[match self {
            Self::Cut(..) => 0,
            Self::CutOneWay(..) => 1,
            Self::Hold(..) => 2,
            Self::Slow(..) => 3,
            Self::Lossy(..) => 4,
            Self::Freeze(_) => 5,
            Self::Kill(_) => 6,
            Self::Vanish(_) => 7,
        }]
    }

    /// Hosts that it is about; with one, all of its links are.
    fn hosts(&self) -> (&str, Option<&str>) {
        match self {
            Self::Cut(one, other)
            | Self::CutOneWay(one, other)
            | Self::Hold(one, other)
            | Self::Slow(one, other, _)
            | Self::Lossy(one, other, _) => (one, Some(other)),
            Self::Freeze(host) | Self::Kill(host) | Self::Vanish(host) => (host, None),
        }
    }

    fn shares_a_link_with(&self, other: &Self) -> bool {
        match (self.hosts(), other.hosts()) {
            ((a, Some(b)), (c, Some(d))) => (a == c && b == d) || (a == d && b == c),
            ((a, None), (c, d)) | ((c, d), (a, None)) => a == c || Some(a) == d || d.is_none(),
        }
    }
}

pub(super) fn draw(rng: &mut Rng, workers: &[String]) -> Vec<Fault> {
    let mut faults: Vec<Fault> = Vec::new();
    for _ in 0..1 + rng.below(5) {
        let fault = Fault {
            at: rng.below(BEGIN) as u64,
            lasts: 20 + rng.below(LONGEST) as u64,
            action: action(rng, workers),
        };
        let free = faults.iter().all(|before| {
            before.at + before.lasts < fault.at
                || fault.at + fault.lasts < before.at
                || !before.action.shares_a_link_with(&fault.action)
        });
        if free {
            faults.push(fault);
        }
    }
    faults.sort_by_key(|fault| fault.at);
    faults
}

fn action(rng: &mut Rng, workers: &[String]) -> Action {
    let one = rng.below(workers.len());
    let worker = workers[one].clone();
    // Another worker, or the router: hand-offs and orders cross both kinds of link.
    let other = if rng.below(2) == 0 {
        ROUTER.to_owned()
    } else {
        workers[(one + 1 + rng.below(workers.len() - 1)) % workers.len()].clone()
    };
    match rng.below(17) {
        0..=1 => Action::Cut(worker, other),
        2..=3 => {
            if rng.below(2) == 0 {
                Action::CutOneWay(worker, other)
            } else {
                Action::CutOneWay(other, worker)
            }
        }
        4..=5 => Action::Hold(worker, other),
        6..=7 => Action::Slow(worker, other, 50 + rng.below(1_500) as u64),
        8..=9 => Action::Lossy(worker, other, 1 + rng.below(20) as u64),
        10 => Action::Freeze(worker),
        11..=13 => Action::Kill(worker),
        14..=15 => Action::Vanish(worker),
        _ => Action::Kill(ROUTER.to_owned()),
    }
}
