from __future__ import annotations

from itertools import count

from headgate.core.leases import Filled, Granted, LeaseTable, Withdrawn


def table() -> LeaseTable:
    return LeaseTable(generation=7, draw_id=count(1).__next__)


def test_a_lease_is_found_only_by_its_own_generation():
    leases = table()
    lease = leases.grant(5, 0, (1, 2), until_s=10)
    assert leases.find(lease.id, 6) is None and leases.find(99, 7) is None
    assert leases.find(lease.id, 7) is lease
    leases.end(lease.id)
    assert leases.find(lease.id, 7) is None and len(leases) == 0


def test_a_renewed_lease_expires_later():
    leases = table()
    kept, lost = leases.grant(1, 0, (1,), until_s=10), leases.grant(2, 0, (2,), until_s=10)
    assert leases.renew(kept.id, 7, until_s=20)
    assert not leases.renew(kept.id, 6, until_s=99)
    assert [lease.id for lease in leases.overdue(10)] == [lost.id]
    assert [lease.id for lease in leases.overdue(20)] == [kept.id, lost.id]


def test_lease_events_are_reported_in_order_and_once():
    leases = table()
    lease = leases.grant(5, 0, (1, 2), until_s=10)
    leases.fill(lease.id, 1)
    assert leases.blocks == 2
    leases.end(lease.id)
    assert leases.take_news() == [Granted(lease), Filled(lease.id, 1), Withdrawn(lease.id)]
    assert leases.take_news() == []
