"""The airline tools of tau2, with their official effects and error texts (sierra-research/tau2-bench).

As officially, only booking takes seats: changed and cancelled reservations leave the flights as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from teamtr_lora.tasks.benchmarks.tau2_tools import Amount, Record, ToolError, Toolkit

NOW = "2024-05-15T15:00:00"
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")  # as many as a task may make
NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
BAG_PRICE, INSURANCE_PRICE = 50, 30
AIRPORTS = {
    "SFO": "San Francisco",
    "JFK": "New York",
    "LAX": "Los Angeles",
    "ORD": "Chicago",
    "DFW": "Dallas",
    "DEN": "Denver",
    "SEA": "Seattle",
    "ATL": "Atlanta",
    "MIA": "Miami",
    "BOS": "Boston",
    "PHX": "Phoenix",
    "IAH": "Houston",
    "LAS": "Las Vegas",
    "MCO": "Orlando",
    "EWR": "Newark",
    "CLT": "Charlotte",
    "MSP": "Minneapolis",
    "DTW": "Detroit",
    "PHL": "Philadelphia",
    "LGA": "LaGuardia",
}

Cabin = Literal["business", "economy", "basic_economy"]
TripType = Literal["round_trip", "one_way"]
YesNo = Literal["yes", "no"]


class FlightInfo(BaseModel):
    flight_number: str
    date: str


class Passenger(BaseModel):
    first_name: str
    last_name: str
    dob: str


class Payment(BaseModel):
    payment_id: str
    amount: Amount


Flights = Annotated[list[FlightInfo], Field(max_length=50)]
Passengers = Annotated[list[Passenger], Field(max_length=50)]
Payments = Annotated[list[Payment], Field(max_length=50)]


class AirlineTools(Toolkit):
    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: TripType,
        cabin: Cabin,
        flights: Flights,
        passengers: Passengers,
        payment_methods: Payments,
        total_baggages: Amount,
        nonfree_baggages: Amount,
        insurance: YesNo,
    ) -> Record:
        """Book a reservation: every flight of it, all passengers with first_name, last_name and dob, and payments from the user's
        profile that add up to the price (bags that are not free cost 50 each, insurance 30 a passenger)."""
        user = self._user(user_id)
        reservation_id = next((new for new in NEW_RESERVATIONS if self.db.find("reservations", new) is None), None)
        if reservation_id is None:
            raise ToolError("Too many reservations")
        legs = [self._leg(info, cabin, len(passengers)) for info in flights]
        extras = INSURANCE_PRICE * len(passengers) * (insurance == "yes") + BAG_PRICE * nonfree_baggages
        self._check_payments(user, payment_methods, sum(leg["price"] for leg in legs) * len(passengers) + extras)
        user = self.db.edit("users", user_id)
        for payment in payment_methods:
            self._pay(user, payment.payment_id, payment.amount)
        for leg in legs:
            day = self.db.edit("flights", leg["flight_number"])["dates"][leg["date"]]
            day["available_seats"][cabin] -= len(passengers)
        reservation = {
            "reservation_id": reservation_id,
            "user_id": user_id,
            "origin": origin,
            "destination": destination,
            "flight_type": flight_type,
            "cabin": cabin,
            "flights": legs,
            "passengers": [passenger.model_dump() for passenger in passengers],
            "payment_history": [payment.model_dump() for payment in payment_methods],
            "created_at": NOW,
            "total_baggages": total_baggages,
            "nonfree_baggages": nonfree_baggages,
            "insurance": insurance,
        }
        self.db.add("reservations", reservation_id, reservation)
        user["reservations"].append(reservation_id)
        return _shown(reservation)

    def cancel_reservation(self, reservation_id: str) -> Record:
        """Cancel a whole reservation and refund it. Whether the policy allows it is for you to check."""
        paid = self._reservation(reservation_id)["payment_history"]
        back = [{"payment_id": payment["payment_id"], "amount": -payment["amount"]} for payment in paid]
        return self._changed(reservation_id, back, status="cancelled")

    def get_flight_status(self, flight_number: str, date: str) -> str:
        """Status of a flight on a date such as '2024-05-01'."""
        return str(self._day(flight_number, date)["status"])

    def get_reservation_details(self, reservation_id: str) -> Record:
        """A reservation by its id, such as '8JX2WO'."""
        return _shown(self._reservation(reservation_id))

    def get_user_details(self, user_id: str) -> Record:
        """A user's profile: name, address, membership, payment methods, reservations."""
        return self._user(user_id)

    def list_all_airports(self) -> list[Record]:
        """All airports and their cities."""
        return [{"iata": code, "city": city} for code, city in AIRPORTS.items()]

    def search_direct_flight(self, origin: str, destination: str, date: str) -> list[Record]:
        """Direct flights between two airports (three letters) on a date such as '2024-05-01' that can be booked."""
        return self._search(date, origin, destination)

    def search_onestop_flight(self, origin: str, destination: str, date: str) -> list[list[Record]]:
        """Pairs of flights between two airports with one stop, on a date such as '2024-05-01', that can be booked."""
        pairs = []
        for first in self._search(date, origin, None):
            arrival = first["scheduled_arrival_time_est"]
            next_day = date
            if "+1" in arrival:
                if not date[-2:].isdecimal():
                    raise ToolError(f"{date[:40]} is no date")
                next_day = f"2024-05-{int(date[-2:]) + 1}"
            for second in self._search(next_day, first["destination"], destination, leave_after=arrival):
                pairs.append([{**first, "date": date}, {**second, "date": next_day}])
        return pairs

    def send_certificate(self, user_id: str, amount: Amount) -> str:
        """Give a user a travel certificate as compensation; amount in dollars."""
        methods = self._user(user_id)["payment_methods"]
        new = next((name for name in NEW_CERTIFICATES if name not in methods), None)
        if new is None:
            raise ToolError("Too many certificates")
        self.db.edit("users", user_id)["payment_methods"][new] = {"source": "certificate", "id": new, "amount": float(amount)}
        return f"Certificate {new} added to user {user_id} with amount {amount}."

    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: Amount, nonfree_baggages: Amount, payment_id: str
    ) -> Record:
        """Set the numbers of all bags and of those that are not free (50 dollars each); payment_id, from the profile, pays."""
        before = self._reservation(reservation_id)
        price = BAG_PRICE * max(0, nonfree_baggages - before["nonfree_baggages"])
        paid = self._payment(before["user_id"], payment_id, price)
        return self._changed(reservation_id, paid, total_baggages=total_baggages, nonfree_baggages=nonfree_baggages)

    def update_reservation_flights(self, reservation_id: str, cabin: Cabin, flights: Flights, payment_id: str) -> Record:
        """Set the cabin and all flights of a reservation (those that stay, too); payment_id from the user's profile pays or
        receives the difference. Whether the policy allows it is for you to check."""
        before = self._reservation(reservation_id)
        people, legs = len(before["passengers"]), []
        for info in flights:
            kept = [leg for leg in before["flights"] if cabin == before["cabin"] and _same(leg, info)]
            legs.append(dict(kept[0]) if kept else self._leg(info, cabin, people))
        price = (sum(leg["price"] for leg in legs) - sum(leg["price"] for leg in before["flights"])) * people
        paid = self._payment(before["user_id"], payment_id, price)
        return self._changed(reservation_id, paid, flights=legs, cabin=cabin)

    def update_reservation_passengers(self, reservation_id: str, passengers: Passengers) -> Record:
        """Set the passengers of a reservation; their number stays."""
        if len(passengers) != len(self._reservation(reservation_id)["passengers"]):
            raise ToolError("Number of passengers does not match")
        return self._changed(reservation_id, [], passengers=[passenger.model_dump() for passenger in passengers])

    def _user(self, user_id: str) -> Record:
        return self._record("users", user_id, "User {key} not found")

    def _reservation(self, reservation_id: str) -> Record:
        return self._record("reservations", reservation_id, "Reservation {key} not found")

    def _changed(self, reservation_id: str, payments: list[Record], **fields: Any) -> Record:
        reservation = self.db.edit("reservations", reservation_id)
        reservation["payment_history"] += payments
        reservation.update(fields)
        return _shown(reservation)

    def _flight(self, flight_number: str) -> Record:
        return self._record("flights", flight_number, "Flight {key} not found")

    def _day(self, flight_number: str, date: str) -> Record:
        dates: dict[str, Record] = self._flight(flight_number)["dates"]
        if date not in dates:
            raise ToolError(f"Flight {flight_number} not found on date {date[:40]}")
        return dates[date]

    def _leg(self, info: FlightInfo, cabin: str, people: int) -> Record:
        """A flight as a reservation holds it, if there are seats for everybody."""
        number, date = info.flight_number, info.date
        day = self._day(number, date)
        if day["status"] != "available":
            raise ToolError(f"Flight {number} not available on date {date}")
        if day["available_seats"][cabin] < people:
            raise ToolError(f"Not enough seats on flight {number}")
        flight = self._flight(number)
        ends = {"origin": flight["origin"], "destination": flight["destination"]}
        return {"flight_number": number, **ends, "date": date, "price": day["prices"][cabin]}

    def _check_payments(self, user: Record, payments: list[Payment], price: int) -> None:
        for payment in payments:
            method = user["payment_methods"].get(payment.payment_id)
            if method is None:
                raise ToolError(f"Payment method {payment.payment_id[:100]} not found")
            if method["source"] in ("gift_card", "certificate") and method["amount"] < payment.amount:
                raise ToolError(f"Not enough balance in payment method {payment.payment_id}")
        paid = sum(payment.amount for payment in payments)
        if paid != price:
            raise ToolError(f"Payment amount does not add up, total price is {price}, but paid {paid}")

    def _pay(self, user: Record, payment_id: str, amount: float) -> None:
        """What is left of a certificate is lost."""
        method = user["payment_methods"].get(payment_id)
        if method is not None and method["source"] == "gift_card":
            method["amount"] -= amount
        elif method is not None and method["source"] == "certificate":
            del user["payment_methods"][payment_id]

    def _payment(self, user_id: str, payment_id: str, price: int) -> list[Record]:
        """Takes what a change costs, or gives it back; the entry for the reservation's history, if any."""
        method = self._user(user_id)["payment_methods"].get(payment_id)
        if method is None:
            raise ToolError("Payment method not found")
        if method["source"] == "certificate":
            raise ToolError("Certificate cannot be used to update reservation")
        if method["source"] == "gift_card":
            if method["amount"] < price:
                raise ToolError("Gift card balance is not enough")
            self._pay(self.db.edit("users", user_id), payment_id, price)
        return [{"payment_id": payment_id, "amount": price}] if price else []

    def _search(self, date: str, origin: str, destination: str | None, leave_after: str = "") -> list[Record]:
        found = []
        for _, flight in self.db.all("flights"):
            day: dict[str, Any] = flight["dates"].get(date, {})
            if (
                flight["origin"] == origin
                and destination in (None, flight["destination"])
                and day.get("status") == "available"
                and flight["scheduled_departure_time_est"] >= leave_after
            ):
                keys = ("flight_number", "origin", "destination")
                times = ("scheduled_departure_time_est", "scheduled_arrival_time_est")
                shown = {key: flight[key] for key in keys} | {"status": "available"} | {key: flight[key] for key in times}
                found.append(shown | {"date": None, "available_seats": day["available_seats"], "prices": day["prices"]})
        return found


def _same(leg: Record, info: FlightInfo) -> bool:
    return bool(leg["flight_number"] == info.flight_number and leg["date"] == info.date)


def _shown(reservation: Record) -> Record:
    return {**reservation, "status": reservation.get("status")}
