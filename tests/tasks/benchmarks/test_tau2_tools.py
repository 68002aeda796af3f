"""The tools of both tau2 domains: what they change, what they refuse, and that nothing an agent writes crashes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.tasks.benchmarks.tau2_airline import AirlineTools
from teamtr_lora.tasks.benchmarks.tau2_retail import RetailTools
from teamtr_lora.tasks.benchmarks.tau2_tools import Database, ToolError, Toolkit, arithmetic

# two small shops: three orders of one customer, six flights and one reservation
TABLES = json.loads(Path(__file__).with_name("tau2_tables.json").read_text())
RETAIL, AIRLINE = TABLES["retail"], TABLES["airline"]
HOME = RETAIL["users"]["ada_1"]["address"]


def retail() -> RetailTools:
    return RetailTools(Database(RETAIL))


def airline() -> AirlineTools:
    return AirlineTools(Database(AIRLINE))


def ok(kit: Toolkit, tool: str, **arguments: Any) -> Any:
    text, failed = kit.call(tool, arguments)
    assert not failed, text
    try:
        return json.loads(text)
    except ValueError:
        return text


def error(kit: Toolkit, tool: str, **arguments: Any) -> str:
    before = kit.db.changes()
    text, failed = kit.call(tool, arguments)
    assert failed and text.startswith("Error: ") and kit.db.changes() == before, "an error changes nothing"
    return text.removeprefix("Error: ")


def gift(kit: Toolkit) -> float:
    user = kit.db.find("users", "ada_1" if isinstance(kit, RetailTools) else "bo_2")
    assert user is not None
    card = next(method for method in user["payment_methods"].values() if method["source"] == "gift_card")
    return float(card["balance"] if "balance" in card else card["amount"])


def test_lookups() -> None:
    kit = retail()
    assert ok(kit, "find_user_id_by_email", email="ada@EXAMPLE.com") == "ada_1"
    assert ok(kit, "find_user_id_by_name_zip", first_name="ADA", last_name="li", zip="10001") == "ada_1"
    assert ok(kit, "get_item_details", item_id="i2")["price"] == 12.5
    assert ok(kit, "list_all_product_types") == {"Box": "p2", "Cup": "p1"}
    order = ok(kit, "get_order_details", order_id="#W1")
    assert order["status"] == "pending" and order["cancel_reason"] is None and order["return_items"] is None
    assert error(kit, "find_user_id_by_name_zip", first_name="Ada", last_name="Li", zip="2") == "User not found"
    assert error(kit, "get_order_details", order_id="W1") == "Order not found"
    assert error(kit, "get_item_details", item_id="p1") == "Item not found"
    assert error(kit, "get_product_details", product_id="i1") == "Product not found"
    assert error(kit, "think", thought="x") == "Tool 'think' not found."
    assert kit.db.changes() == {}


def test_cancelling_refunds_a_gift_card_at_once() -> None:
    kit = retail()
    assert (
        error(kit, "cancel_pending_order", order_id="#W2", reason="no longer needed") == "Non-pending order cannot be cancelled"
    )
    assert error(kit, "cancel_pending_order", order_id="#W1", reason="too dear") == "Invalid reason"
    order = ok(kit, "cancel_pending_order", order_id="#W1", reason="no longer needed")
    assert order["status"] == "cancelled" and order["cancel_reason"] == "no longer needed" and gift(kit) == 45.0
    assert order["payment_history"][1] == {"transaction_type": "refund", "amount": 25.0, "payment_method_id": "gift_card_1"}
    ok(kit, "cancel_pending_order", order_id="#W3", reason="ordered by mistake")
    assert gift(kit) == 45.0, "a credit card gets its money later"
    assert set(kit.db.changes()) == {("orders", "#W1"), ("orders", "#W3"), ("users", "ada_1")}
    assert RETAIL["orders"]["#W1"]["status"] == "pending", "the file's records are never written"


def test_exchanges_and_returns_of_delivered_orders() -> None:
    kit = retail()
    give = {"order_id": "#W2", "item_ids": ["i1", "j1"], "new_item_ids": ["i2", "j2"], "payment_method_id": "gift_card_1"}
    tool = "exchange_delivered_order_items"
    assert error(kit, tool, **give | {"order_id": "#W1"}) == "Non-delivered order cannot be exchanged"
    assert error(kit, tool, **give | {"item_ids": ["i1", "i9"]}) == "Number of i9 not found."
    assert error(kit, tool, **give | {"item_ids": ["i1"]}) == "The number of items to be exchanged should match."
    assert error(kit, tool, **give | {"new_item_ids": ["j2", "j2"]}) == "Variant not found"
    assert error(kit, tool, **give | {"new_item_ids": ["i3", "j2"]}) == "New item i3 not found or available"
    assert error(kit, tool, **give | {"payment_method_id": "x"}) == "Payment method not found"
    dear = give | {"new_item_ids": ["i4", "j2"]}
    assert error(kit, tool, **dear) == "Insufficient gift card balance to pay for the price difference"
    order = ok(kit, tool, **give)
    assert order["status"] == "exchange requested" and order["exchange_price_difference"] == 1.5
    assert (order["exchange_items"], order["exchange_new_items"]) == (["i1", "j1"], ["i2", "j2"]) and gift(kit) == 20.0
    assert error(kit, tool, **give) == "Non-delivered order cannot be exchanged"

    kit = retail()
    back = {"order_id": "#W2", "item_ids": ["j1", "i1", "i1"], "payment_method_id": "credit_card_1"}
    tool = "return_delivered_order_items"
    assert error(kit, tool, **back | {"payment_method_id": "paypal_1"}) == "Payment method should be the original payment method"
    assert error(kit, tool, **back | {"item_ids": ["i1"] * 3}) == "Some item not found"
    order = ok(kit, tool, **back)
    assert order["status"] == "return requested" and order["return_items"] == ["i1", "i1", "j1"]
    assert ok(retail(), tool, **back | {"payment_method_id": "gift_card_1"})["return_payment_method_id"] == "gift_card_1"


def test_changes_of_pending_orders() -> None:
    kit = retail()
    change = {"order_id": "#W1", "item_ids": ["i1"], "new_item_ids": ["i2"], "payment_method_id": "gift_card_1"}
    tool = "modify_pending_order_items"
    assert error(kit, tool, **change | {"new_item_ids": ["i1"]}) == "The new item id should be different from the old item id"
    assert error(kit, tool, **change | {"new_item_ids": ["i4"]}) == "Insufficient gift card balance to pay for the new item"
    order = ok(kit, tool, **change)
    assert [item["item_id"] for item in order["items"]] == ["i2", "i1", "j1"] and order["status"] == "pending (item modified)"
    assert order["items"][0]["price"] == 12.5 and order["items"][0]["options"] == {"color": "blue"} and gift(kit) == 17.5
    assert order["payment_history"][1] == {"transaction_type": "payment", "amount": 2.5, "payment_method_id": "gift_card_1"}
    assert error(kit, tool, **change) == "Non-pending order cannot be modified", "only once"
    moved = ok(kit, "modify_pending_order_address", order_id="#W1", **HOME | {"city": "Oslo"})
    assert moved["address"]["city"] == "Oslo", "the address may still change"
    both = change | {"item_ids": ["j1", "i1"], "new_item_ids": ["j2", "i2"], "order_id": "#W3"}
    order = ok(retail(), tool, **both)
    assert [(item["item_id"], item["price"]) for item in order["items"]] == [("i2", 12.5), ("i1", 10.0), ("j2", 12.5)], (
        "as in tau2"
    )

    kit = retail()
    pay = "modify_pending_order_payment"
    different = "The new payment method should be different from the current one"
    assert error(kit, pay, order_id="#W1", payment_method_id="gift_card_1") == different
    lacking = "Insufficient gift card balance to pay for the order"
    assert error(kit, pay, order_id="#W3", payment_method_id="gift_card_1") == lacking
    order = ok(kit, pay, order_id="#W1", payment_method_id="paypal_1")
    assert [p["transaction_type"] for p in order["payment_history"]] == ["payment", "payment", "refund"] and gift(kit) == 45.0
    once = "There should be exactly one payment for a pending order"
    assert error(kit, pay, order_id="#W1", payment_method_id="credit_card_1") == once
    ok(kit, "modify_user_address", user_id="ada_1", **HOME | {"zip": "2"})
    assert ok(kit, "find_user_id_by_name_zip", first_name="Ada", last_name="Li", zip="2") == "ada_1"
    same = retail()
    ok(same, "modify_user_address", user_id="ada_1", **HOME)
    assert same.db.changes() == {}, "what is set to what it was is no change"


BOOKING: dict[str, Any] = {
    "user_id": "bo_2",
    "origin": "JFK",
    "destination": "LAX",
    "flight_type": "one_way",
    "cabin": "economy",
    "flights": [{"flight_number": "F2", "date": "2024-05-20"}, {"flight_number": "F3", "date": "2024-05-20"}],
    "passengers": [{"first_name": "Bo", "last_name": "Ray", "dob": "1990-01-01"}],
    "payment_methods": [
        {"payment_id": "certificate_2", "amount": 150},
        {"payment_id": "gift_card_2", "amount": 100},
        {"payment_id": "credit_card_2", "amount": 30},
    ],
    "total_baggages": 2,
    "nonfree_baggages": 1,
    "insurance": "yes",
}


def test_booking_takes_seats_and_money() -> None:
    kit = airline()
    tool = "book_reservation"
    short = BOOKING | {"payment_methods": BOOKING["payment_methods"][:2]}
    assert error(kit, tool, **short) == "Payment amount does not add up, total price is 280, but paid 250"
    assert error(kit, tool, **BOOKING | {"cabin": "first"}).startswith("cabin: ")
    assert error(kit, tool, **BOOKING | {"passengers": BOOKING["passengers"] * 3}) == "Not enough seats on flight F2"
    gone = BOOKING | {"flights": [{"flight_number": "F2", "date": "2024-05-01"}]}
    assert error(kit, tool, **gone) == "Flight F2 not available on date 2024-05-01"
    never = BOOKING | {"flights": [{"flight_number": "F2", "date": "2024-06-01"}]}
    assert error(kit, tool, **never) == "Flight F2 not found on date 2024-06-01"
    dear = [{"payment_id": "certificate_2", "amount": 280}]
    assert error(kit, tool, **BOOKING | {"payment_methods": dear}) == "Not enough balance in payment method certificate_2"
    booked = ok(kit, tool, **BOOKING)
    assert booked["reservation_id"] == "HATHAT" and booked["created_at"] == "2024-05-15T15:00:00" and booked["status"] is None
    assert [leg["price"] for leg in booked["flights"]] == [100, 100] and gift(kit) == 150.0
    user = ok(kit, "get_user_details", user_id="bo_2")
    assert "certificate_2" not in user["payment_methods"] and user["reservations"] == ["R1", "HATHAT"]
    left = ok(kit, "search_direct_flight", origin="JFK", destination="ORD", date="2024-05-20")
    assert left[0]["available_seats"]["economy"] == 1
    assert AIRLINE["flights"]["F2"]["dates"]["2024-05-20"]["available_seats"]["economy"] == 2
    whole = [{"payment_id": "credit_card_2", "amount": 280.0}]
    assert ok(kit, tool, **BOOKING | {"payment_methods": whole})["reservation_id"] == "HATHAU"
    assert error(kit, tool, **BOOKING | {"payment_methods": whole}) == "Not enough seats on flight F2"


def test_changes_of_reservations() -> None:
    kit = airline()
    tool = "update_reservation_flights"
    new = {"reservation_id": "R1", "cabin": "economy", "payment_id": "gift_card_2"}
    kept = ok(kit, tool, **new, flights=[{"flight_number": "F1", "date": "2024-05-20"}])
    assert kept["flights"][0]["price"] == 80 and len(kept["payment_history"]) == 1, "a flight that stays keeps its price"
    assert kit.db.changes() == {}
    moved = ok(kit, tool, **new, flights=[{"flight_number": "F1", "date": "2024-05-21"}])
    assert moved["payment_history"][1] == {"payment_id": "gift_card_2", "amount": 40} and gift(kit) == 210.0
    assert error(kit, tool, **new | {"cabin": "business"}, flights=[{"flight_number": "F1", "date": "2024-05-21"}]) == (
        "Not enough seats on flight F1"
    )
    cheap = ok(kit, tool, **new | {"cabin": "basic_economy"}, flights=[{"flight_number": "F1", "date": "2024-05-21"}])
    assert cheap["cabin"] == "basic_economy" and gift(kit) == 310.0
    certificate = new | {"payment_id": "certificate_2", "flights": [{"flight_number": "F1", "date": "2024-05-20"}]}
    assert error(kit, tool, **certificate) == "Certificate cannot be used to update reservation"

    kit = airline()
    bags = {"reservation_id": "R1", "total_baggages": 4, "nonfree_baggages": 2, "payment_id": "gift_card_2"}
    assert error(kit, "update_reservation_baggages", **bags | {"nonfree_baggages": 9}) == "Gift card balance is not enough"
    assert error(kit, "update_reservation_baggages", **bags | {"payment_id": "x"}) == "Payment method not found"
    done = ok(kit, "update_reservation_baggages", **bags)
    assert (done["total_baggages"], done["nonfree_baggages"], gift(kit)) == (4, 2, 150.0)
    people = [{"first_name": "Cy", "last_name": "Ray", "dob": "1991-01-01", "seat": "1A"}] * 2
    assert error(kit, "update_reservation_passengers", reservation_id="R1", passengers=people[:1]) == (
        "Number of passengers does not match"
    )
    assert ok(kit, "update_reservation_passengers", reservation_id="R1", passengers=people)["passengers"][1]["first_name"] == "Cy"
    gone = ok(kit, "cancel_reservation", reservation_id="R1")
    assert gone["status"] == "cancelled" and [p["amount"] for p in gone["payment_history"]] == [160, 100, -160, -100]
    assert error(kit, "cancel_reservation", reservation_id="r1") == "Reservation r1 not found"


def test_flights_with_a_stop_and_certificates() -> None:
    kit = airline()
    pairs = ok(kit, "search_onestop_flight", origin="JFK", destination="LAX", date="2024-05-20")
    assert [(a["flight_number"], b["flight_number"], b["date"]) for a, b in pairs] == [
        ("F2", "F3", "2024-05-20"),
        ("F5", "F6", "2024-05-21"),
    ]
    assert ok(kit, "get_flight_status", flight_number="F1", date="2024-05-01") == "landed"
    assert len(ok(kit, "list_all_airports")) == 20
    for number in (3221322, 3221323, 3221324):
        said = ok(kit, "send_certificate", user_id="bo_2", amount=100)
        assert said == f"Certificate certificate_{number} added to user bo_2 with amount 100."
    assert error(kit, "send_certificate", user_id="bo_2", amount=100) == "Too many certificates"
    assert ok(kit, "transfer_to_human_agents", summary="x") == "Transfer successful"


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * ((350 - 122) + (499 - 127))", "1200.0"), ("10 / 4", "2.5"), ("-3.14159", "-3.14"), ("7 // 2", "3.0"), ("(1)", "1.0")],
)
def test_calculating(expression: str, value: str) -> None:
    assert retail().call("calculate", {"expression": expression}) == (value, False)


@pytest.mark.parametrize(
    "expression", ["1/0", "2 **", "9**9**9", "()", "", "1 1", "-" * 299 + "1" * 9, "(" * 250, "1." * 90, "9" * 299]
)
def test_expressions_that_have_no_value(expression: str) -> None:
    text, failed = airline().call("calculate", {"expression": expression})
    assert failed == text.startswith("Error: ") and "\n" not in text
    with pytest.raises(ToolError, match="too long"):
        arithmetic("1+" * 200 + "1")
    assert error(airline(), "calculate", expression="__import__('os')") == "Invalid characters in expression"


WORDS = st.sampled_from(
    ["#W1", "#W2", "ada_1", "bo_2", "R1", "F1", "i1", "j1", "gift_card_1", "gift_card_2", "2024-05-20", "economy"]
)
VALUES = st.recursive(
    WORDS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["flight_number", "date", "payment_id", "amount", "first_name", "x"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.data())
def test_no_arguments_crash_a_tool(data: st.DataObject) -> None:
    for kit in (retail(), airline()):
        name = data.draw(st.sampled_from(sorted(kit.checks)))
        keys = list(kit.checks[name].model_fields)
        arguments = {key: data.draw(VALUES) for key in data.draw(st.lists(st.sampled_from([*keys, "x"]), unique=True))}
        text, failed = kit.call(name, arguments)
        assert isinstance(text, str) and failed == text.startswith("Error: ")


def test_half_an_emoji_makes_no_error_that_cannot_be_written() -> None:
    for kit, tool, arguments in (
        (airline(), "get_user_details", {"user_id": "\ud83d"}),
        (airline(), "get_user_details", {"\ud83d": "x"}),
        (
            retail(),
            "exchange_delivered_order_items",
            {"order_id": "#W2", "item_ids": ["\ud83d"], "new_item_ids": [], "payment_method_id": "x"},
        ),
        (retail(), "modify_user_address", {"user_id": "ada_1", **HOME, "city": "\ud83d"}),
    ):
        assert kit.call(tool, arguments)[0].encode("utf-8")


def test_huge_arguments_are_refused() -> None:
    assert error(airline(), "send_certificate", user_id="bo_2", amount=10**4000).startswith("amount: ")
    back = {"order_id": "#W2", "item_ids": ["i1"] * 10**5, "payment_method_id": "credit_card_1"}
    assert error(retail(), "return_delivered_order_items", **back).startswith("item_ids: ")
