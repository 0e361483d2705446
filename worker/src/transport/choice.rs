//! Which transport a pair uses: the first that both have, in the policy's order.

use std::sync::Arc;

use super::Transport;

/// A way that a source offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Kind, as in [`Transport::kind`].
    pub kind: String,
    /// Where, in that transport's own form.
    pub address: String,
}

/// The first kind in `order` that the source offers and this worker has, with its address. An empty order is this worker's own.
pub fn choose<'a>(
    order: &[String],
    offers: &'a [Offer],
    have: &[Arc<dyn Transport>],
) -> Option<(Arc<dyn Transport>, &'a str)> {
    let shared = |kind: &str| {
        let transport = have.iter().find(|transport| transport.kind() == kind)?;
        let offer = offers.iter().find(|offer| offer.kind == kind)?;
        Some((Arc::clone(transport), offer.address.as_str()))
    };
    if order.is_empty() {
        return have.iter().find_map(|transport| shared(transport.kind()));
    }
    order.iter().find_map(|kind| shared(kind))
}

#[cfg(test)]
mod tests {
    use super::super::local::LocalTransport;
    use super::super::tcp::TcpTransport;
    use super::*;

    fn chosen(order: &[&str], offers: &[&str]) -> Option<String> {
        let have: Vec<Arc<dyn Transport>> = vec![
            Arc::new(LocalTransport::new()),
            Arc::new(TcpTransport::default()),
        ];
        let order: Vec<_> = order.iter().map(|kind| (*kind).to_owned()).collect();
        let offers: Vec<_> = offers
            .iter()
            .map(|kind| Offer {
                kind: (*kind).to_owned(),
                address: format!("at {kind}"),
            })
            .collect();
        choose(&order, &offers, &have).map(|(transport, address)| {
            assert_eq!(address, format!("at {}", transport.kind()));
            transport.kind().to_owned()
        })
    }

    #[test]
    fn the_policy_orders_and_both_must_have_it() {
        assert_eq!(
            chosen(&["Rdma", "Tcp", "Local"], &["Rdma", "Local", "Tcp"]).as_deref(),
            Some("Tcp")
        );
        assert_eq!(chosen(&["Local", "Tcp"], &["Tcp"]).as_deref(), Some("Tcp"));
        assert_eq!(chosen(&[], &["Tcp", "Local"]).as_deref(), Some("Local"));
        assert_eq!(chosen(&["Rdma"], &["Rdma", "Tcp"]), None);
        assert_eq!(chosen(&["Tcp"], &[]), None);
    }
}
