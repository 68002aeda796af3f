"""The retail tools of tau2, with their official effects and error texts (sierra-research/tau2-bench).

Two official oddities are kept, because rewards compare database states: modifying several items of a pending order gives all of
them the price and options of the last new item, and the price difference is stored there without rounding.
"""

from __future__ import annotations

from typing import Any

from teamtr_lora.tasks.benchmarks.tau2_tools import Ids, Record, ToolError, Toolkit

REASONS = ("no longer needed", "ordered by mistake")
LATER_FIELDS = (
    "cancel_reason",
    "exchange_items",
    "exchange_new_items",
    "exchange_payment_method_id",
    "exchange_price_difference",
    "return_items",
    "return_payment_method_id",
)


class RetailTools(Toolkit):
    def cancel_pending_order(self, order_id: str, reason: str) -> Record:
        """Cancel a pending order and refund it. reason: 'no longer needed' or 'ordered by mistake'. Ask the customer to confirm
        first."""
        order = self._order(order_id, "pending", "Non-pending order cannot be cancelled")
        if reason not in REASONS:
            raise ToolError("Invalid reason")
        paid = [(payment["payment_method_id"], payment["amount"]) for payment in order["payment_history"]]
        for method, _ in paid:
            self._method(order["user_id"], method)
        for method, amount in paid:
            self._to_card(order["user_id"], method, amount)
        refunds = [_payment("refund", amount, method) for method, amount in paid]
        return self._changed(order_id, refunds, status="cancelled", cancel_reason=reason)

    def exchange_delivered_order_items(self, order_id: str, item_ids: Ids, new_item_ids: Ids, payment_method_id: str) -> Record:
        """Exchange items of a delivered order for others of the same products, in the same positions of both lists; once per
        order. payment_method_id pays or receives the price difference. Ask the customer to confirm first."""
        order = self._order(order_id, "delivered", "Non-delivered order cannot be exchanged")
        self._check_owned(order, item_ids, "Number of {} not found.")
        if len(item_ids) != len(new_item_ids):
            raise ToolError("The number of items to be exchanged should match.")
        pairs = list(zip(item_ids, new_item_ids, strict=True))
        difference = round(sum((self._variant(order, *pair)["price"] - _item(order, pair[0])["price"] for pair in pairs), 0), 2)
        self._check_card(order, payment_method_id, difference, "the price difference")
        return self._changed(
            order_id,
            [],
            status="exchange requested",
            exchange_items=sorted(item_ids),
            exchange_new_items=sorted(new_item_ids),
            exchange_payment_method_id=payment_method_id,
            exchange_price_difference=difference,
        )

    def find_user_id_by_email(self, email: str) -> str:
        """Find a user id by email."""
        return self._find(lambda user: user["email"].lower() == email.lower())

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find a user id by first name, last name and zip code, where the email is not known."""
        said = (first_name.lower(), last_name.lower(), zip)
        return self._find(
            lambda user: (user["name"]["first_name"].lower(), user["name"]["last_name"].lower(), user["address"]["zip"]) == said
        )

    def get_item_details(self, item_id: str) -> Record:
        """Options, availability and price of an item (a variant of a product) by its item id."""
        for _, product in self.db.all("products"):
            if item_id in product["variants"]:
                return dict(product["variants"][item_id])
        raise ToolError("Item not found")

    def get_order_details(self, order_id: str) -> Record:
        """Status and details of an order; its id begins with #, such as '#W0000000'."""
        return _shown(self._order(order_id))

    def get_product_details(self, product_id: str) -> Record:
        """All variants of a product by its product id, which is no item id."""
        return self._product(product_id)

    def get_user_details(self, user_id: str) -> Record:
        """A user's profile: name, address, email, payment methods, orders."""
        return self._user(user_id)

    def list_all_product_types(self) -> Record:
        """Names and product ids of all products."""
        return dict(sorted((product["name"], product["product_id"]) for _, product in self.db.all("products")))

    def modify_pending_order_address(
        self, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Record:
        """Change the shipping address of a pending order. Ask the customer to confirm first."""
        self._order(order_id, "pending", "Non-pending order cannot be modified", or_modified=True)
        return self._changed(order_id, [], address=_address(address1, address2, city, state, country, zip))

    def modify_pending_order_items(self, order_id: str, item_ids: Ids, new_item_ids: Ids, payment_method_id: str) -> Record:
        """Change items of a pending order into others of the same products, in the same positions of both lists; once per order.
        payment_method_id pays or receives the price difference. Ask the customer to confirm first."""
        order = self._order(order_id, "pending", "Non-pending order cannot be modified")
        self._check_owned(order, item_ids, "{} not found")
        if len(item_ids) != len(new_item_ids):
            raise ToolError("The number of items to be exchanged should match")
        difference: float = 0
        last: Record = {}
        for pair in zip(item_ids, new_item_ids, strict=True):
            if pair[0] == pair[1]:
                raise ToolError("The new item id should be different from the old item id")
            last = self._variant(order, *pair)
            difference += last["price"] - _item(order, pair[0])["price"]
        self._check_card(order, payment_method_id, difference, "the new item")
        self._to_card(order["user_id"], payment_method_id, -difference)
        order = self.db.edit("orders", order_id)
        for old, new in zip(item_ids, new_item_ids, strict=True):
            _item(order, old).update(item_id=new, price=last["price"], options=dict(last["options"]))
        paid = _payment("payment" if difference > 0 else "refund", abs(difference), payment_method_id)
        return self._changed(order_id, [paid], status="pending (item modified)")

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Record:
        """Change the payment method of a pending order. Ask the customer to confirm first."""
        order = self._order(order_id, "pending", "Non-pending order cannot be modified", or_modified=True)
        self._method(order["user_id"], payment_method_id)
        history = order["payment_history"]
        if len(history) != 1 or history[0]["transaction_type"] != "payment":
            raise ToolError("There should be exactly one payment for a pending order")
        before, amount = history[0]["payment_method_id"], history[0]["amount"]
        if before == payment_method_id:
            raise ToolError("The new payment method should be different from the current one")
        self._check_card(order, payment_method_id, amount, "the order")
        self._method(order["user_id"], before)
        self._to_card(order["user_id"], payment_method_id, -amount)
        self._to_card(order["user_id"], before, amount)
        return self._changed(order_id, [_payment("payment", amount, payment_method_id), _payment("refund", amount, before)])

    def modify_user_address(
        self, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
    ) -> Record:
        """Change the default address of a user. Ask the customer to confirm first."""
        self._user(user_id)
        user = self.db.edit("users", user_id)
        user["address"] = _address(address1, address2, city, state, country, zip)
        return user

    def return_delivered_order_items(self, order_id: str, item_ids: Ids, payment_method_id: str) -> Record:
        """Return items of a delivered order; the refund goes to the original payment method or a gift card. Ask the customer to
        confirm first."""
        order = self._order(order_id, "delivered", "Non-delivered order cannot be returned")
        method = self._method(order["user_id"], payment_method_id)
        if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
            raise ToolError("Payment method should be the original payment method")
        self._check_owned(order, item_ids, "Some item not found")
        fields = {"return_items": sorted(item_ids), "return_payment_method_id": payment_method_id}
        return self._changed(order_id, [], status="return requested", **fields)

    def _find(self, fits: Any) -> str:
        for user_id, user in self.db.all("users"):
            if fits(user):
                return user_id
        raise ToolError("User not found")

    def _order(self, order_id: str, status: str = "", refused: str = "", *, or_modified: bool = False) -> Record:
        """To read; with `status`, only an order in that state, or (`or_modified`) in one that the state's name is part of."""
        order = self._record("orders", order_id, "Order not found")
        if status and not (status in order["status"] if or_modified else status == order["status"]):
            raise ToolError(refused)
        return order

    def _changed(self, order_id: str, payments: list[Record], **fields: Any) -> Record:
        order = self.db.edit("orders", order_id)
        order["payment_history"] += payments
        order.update(fields)
        return _shown(order)

    def _user(self, user_id: str) -> Record:
        return self._record("users", user_id, "User not found")

    def _product(self, product_id: str) -> Record:
        return self._record("products", product_id, "Product not found")

    def _method(self, user_id: str, method_id: str) -> Record:
        methods: dict[str, Record] = self._user(user_id)["payment_methods"]
        if method_id not in methods:
            raise ToolError("Payment method not found")
        return methods[method_id]

    def _check_card(self, order: Record, method_id: str, price: float, what: str) -> None:
        method = self._method(order["user_id"], method_id)
        if method["source"] == "gift_card" and method["balance"] < price:
            raise ToolError(f"Insufficient gift card balance to pay for {what}")

    def _to_card(self, user_id: str, method_id: str, amount: float) -> None:
        """Gift cards get and give money at once; other methods leave no trace in the profile."""
        if self._method(user_id, method_id)["source"] == "gift_card":
            card = self.db.edit("users", user_id)["payment_methods"][method_id]
            card["balance"] = round(card["balance"] + amount, 2)

    def _variant(self, order: Record, item_id: str, new_item_id: str) -> Record:
        variants: dict[str, Record] = self._product(_item(order, item_id)["product_id"])["variants"]
        if new_item_id not in variants:
            raise ToolError("Variant not found")
        if not variants[new_item_id]["available"]:
            raise ToolError(f"New item {new_item_id} not found or available")
        return variants[new_item_id]

    def _check_owned(self, order: Record, item_ids: list[str], missing: str) -> None:
        """An item may be named as often as the order has it."""
        owned = [item["item_id"] for item in order["items"]]
        for item_id in item_ids:
            if item_ids.count(item_id) > owned.count(item_id):
                raise ToolError(missing.format(item_id[:100]))


def _item(order: Record, item_id: str) -> Record:
    item: Record | None = next((item for item in order["items"] if item["item_id"] == item_id), None)
    if item is None:
        raise ToolError(f"Item {item_id} not found")
    return item


def _payment(kind: str, amount: float, method_id: str) -> Record:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method_id}


def _address(address1: str, address2: str, city: str, state: str, country: str, zip: str) -> Record:
    return {"address1": address1, "address2": address2, "city": city, "country": country, "state": state, "zip": zip}


def _shown(order: Record) -> Record:
    """An order as the tools show it: what has not happened to it is there, as null."""
    return {**order, **{key: order.get(key) for key in LATER_FIELDS}}
