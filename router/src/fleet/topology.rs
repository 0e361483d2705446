//! Where a worker is: its domain at each level of topology, by its card and by whoever lists it. Pure.

use baton_protocol::card::Card;

use super::discovery::Domain;

/// A domain path: the value per level, nearest first.
pub type DomainPath = Vec<Option<String>>;

/// A worker's levels, nearest first. What the listing says holds over what the card says of the same level: in a cluster the
/// node is known to the API server only. Where it says nothing, the card does. Levels that the card alone names come last.
pub fn of(card: &Card, listed: &[Domain]) -> Vec<Domain> {
    let own = |wanted: &str| {
        let mut own = card.topology.iter();
        own.find(|own| own.level == wanted)
            .map(|own| own.domain.clone())
    };
    let known = listed.iter().map(|(level, domain)| {
        let domain = domain.clone().or_else(|| own(level));
        (level.clone(), domain)
    });
    let others = card
        .topology
        .iter()
        .filter(|own| !listed.iter().any(|(level, _)| *level == own.level))
        .map(|own| (own.level.clone(), Some(own.domain.clone())));
    known.chain(others).collect()
}

/// Level names of all workers, nearest first. A level that only some name stands behind the one that precedes it there.
pub fn levels<'a>(workers: impl Iterator<Item = &'a [Domain]>) -> Vec<String> {
    let mut levels: Vec<String> = Vec::new();
    for worker in workers {
        let mut after = 0;
        for (name, _) in worker {
            match levels.iter().position(|level| level == name) {
                Some(position) => after = position + 1,
                None => {
                    levels.insert(after, name.clone());
                    after += 1;
                }
            }
        }
    }
    levels
}

/// A worker's domain path over these levels.
pub fn path(worker: &[Domain], levels: &[String]) -> DomainPath {
    let domain = |level: &String| {
        let found = worker.iter().find(|(name, _)| name == level);
        found.and_then(|(_, domain)| domain.clone())
    };
    levels.iter().map(domain).collect()
}

#[cfg(test)]
mod tests {
    use baton_protocol::card::TopologyDomain;

    use super::*;
    use crate::fleet::samples;

    fn with_levels(names: &[&str]) -> Card {
        let mut card = samples::card("w");
        card.topology = names
            .iter()
            .map(|level| TopologyDomain {
                level: (*level).to_owned(),
                domain: format!("{level}-1"),
            })
            .collect();
        card
    }

    fn known(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn levels_of_cards_that_name_different_ones_keep_each_cards_order() {
        let workers = [
            of(&with_levels(&["host", "zone"]), &[]),
            of(&with_levels(&["clique", "host", "rack"]), &[]),
        ];
        let levels = levels(workers.iter().map(Vec::as_slice));
        assert_eq!(levels, ["clique", "host", "rack", "zone"]);
        let path = path(&workers[0], &levels);
        assert_eq!(path, [None, known("host-1"), None, known("zone-1")]);
    }

    #[test]
    fn what_lists_a_worker_knows_better_where_it_is_and_orders_the_levels() {
        let card = with_levels(&["rack", "host", "own"]);
        let listed = [
            ("host".to_owned(), known("node-a")),
            ("rack".to_owned(), None),
            ("zone".to_owned(), None),
        ];
        let worker = of(&card, &listed);
        let names: Vec<&str> = worker.iter().map(|(level, _)| level.as_str()).collect();
        assert_eq!(names, ["host", "rack", "zone", "own"]);
        let levels = levels([worker.as_slice()].into_iter());
        let path = path(&worker, &levels);
        assert_eq!(
            path,
            [known("node-a"), known("rack-1"), None, known("own-1")]
        );
    }
}
