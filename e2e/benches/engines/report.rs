//! Figures of a cell (one router, one length of prompts, so many clients) over the rounds, and ratios between two routers.
//!
//! A ratio is taken within a round, where both were measured seconds apart, and never between figures of different rounds.

use std::time::Duration;

/// One cell in one round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    pub(crate) requests: usize,
    /// Microseconds.
    pub(crate) first_token_p50: f64,
    pub(crate) first_token_p99: f64,
    pub(crate) per_second: f64,
    /// Microseconds of the router's processor time a request; of the stand-in's where there is no router.
    pub(crate) processor: f64,
    /// MiB of the router at the end.
    pub(crate) resident: f64,
}

impl Figures {
    pub(crate) fn new(
        mut first_tokens: Vec<Duration>,
        counted: Duration,
        spent: Duration,
        resident: f64,
    ) -> Self {
        first_tokens.sort_unstable();
        let requests = first_tokens.len();
        let at = |share: f64| {
            let last = requests.saturating_sub(1);
            let index = (last as f64 * share).round() as usize;
            first_tokens
                .get(index)
                .map_or(0.0, |time| microseconds(*time))
        };
        Self {
            requests,
            first_token_p50: at(0.5),
            first_token_p99: at(0.99),
            per_second: requests as f64 / counted.as_secs_f64(),
            processor: microseconds(spent) / requests.max(1) as f64,
            resident,
        }
    }
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The same figure of several rounds.
#[derive(Clone, Debug)]
pub(crate) struct Rounds(Vec<f64>);

impl Rounds {
    pub(crate) fn new(figures: impl IntoIterator<Item = f64>) -> Self {
        let mut figures: Vec<f64> = figures.into_iter().collect();
        figures.sort_by(f64::total_cmp);
        Self(figures)
    }

    fn median(&self) -> f64 {
        self.0.get(self.0.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// `median [least-most]`; a dash where one of them is no number: what was added drowned in what the machine did besides.
    pub(crate) fn shown(&self, digits: usize) -> String {
        if self.0.iter().any(|figure| figure.is_nan()) {
            return "-".to_owned();
        }
        let least = self.0.first().copied().unwrap_or(f64::NAN);
        let most = self.0.last().copied().unwrap_or(f64::NAN);
        format!(
            "{:.digits$} [{least:.digits$}-{most:.digits$}]",
            self.median()
        )
    }
}

/// What was measured of one router.
#[derive(Debug)]
pub(crate) struct Arm {
    pub(crate) name: String,
    pub(crate) split: bool,
    pub(crate) of_baton: bool,
    /// By cell, then by round; shorter than the others where it failed.
    pub(crate) cells: Vec<Vec<Figures>>,
}

/// Prints one cell of all routers. `direct` is the first of them.
pub(crate) fn cell(arms: &[Arm], cell: usize) {
    let Some(direct) = arms.first() else { return };
    println!(
        "{:36} {:>24} {:>24} {:>22} {:>20} {:>6} {:>8}",
        "router",
        "added TTFT p50, us",
        "added TTFT p99, us",
        "requests/s",
        "CPU us/request",
        "MiB",
        "requests"
    );
    for (place, arm) in arms.iter().enumerate() {
        let own = &arm.cells[cell];
        if own.is_empty() {
            continue;
        }
        let added =
            |figure: fn(&Figures) -> f64| {
                let rounds = own.iter().zip(&direct.cells[cell]);
                // The first row is what the others are taken from.
                Rounds::new(rounds.map(|(own, direct)| {
                    figure(own) - if place == 0 { 0.0 } else { figure(direct) }
                }))
                .shown(0)
            };
        let plain = |figure: fn(&Figures) -> f64| Rounds::new(own.iter().map(figure)).shown(0);
        println!(
            "{:36} {:>24} {:>24} {:>22} {:>20} {:>6.0} {:>8}",
            arm.name,
            added(|figures| figures.first_token_p50),
            added(|figures| figures.first_token_p99),
            plain(|figures| figures.per_second),
            plain(|figures| figures.processor),
            own.last().map_or(0.0, |figures| figures.resident),
            own.iter().map(|figures| figures.requests).sum::<usize>(),
        );
    }
}

/// Prints what each of Baton's rows is of each other router's that does the same, round by round.
pub(crate) fn ratios(arms: &[Arm], cell: usize) {
    let Some(direct) = arms.first() else { return };
    let others = |split: bool| {
        arms.iter()
            .skip(1)
            .filter(move |arm| !arm.of_baton && arm.split == split && !arm.cells[cell].is_empty())
    };
    if others(false).chain(others(true)).next().is_none() {
        return;
    }
    println!(
        "{:36} {:36} {:>18} {:>18} {:>18} {:>18}",
        "Baton", "of", "added TTFT p50", "added TTFT p99", "requests/s", "CPU/request"
    );
    for baton in arms.iter().filter(|arm| arm.of_baton) {
        for other in others(baton.split) {
            let ratio = |figure: fn(&Figures) -> f64, less_direct: bool| {
                let rounds = baton.cells[cell]
                    .iter()
                    .zip(&other.cells[cell])
                    .zip(&direct.cells[cell]);
                Rounds::new(rounds.map(|((own, other), direct)| {
                    let base = if less_direct { figure(direct) } else { 0.0 };
                    let (own, other) = (figure(own) - base, figure(other) - base);
                    if own > 0.0 && other > 0.0 {
                        own / other
                    } else {
                        f64::NAN
                    }
                }))
                .shown(2)
            };
            println!(
                "{:36} {:36} {:>18} {:>18} {:>18} {:>18}",
                baton.name,
                other.name,
                ratio(|figures| figures.first_token_p50, true),
                ratio(|figures| figures.first_token_p99, true),
                ratio(|figures| figures.per_second, false),
                ratio(|figures| figures.processor, false),
            );
        }
    }
}
