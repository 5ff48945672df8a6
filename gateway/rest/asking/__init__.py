"""From the text of a body to a request of the gateway. A body of chat is the inner form of every conversation."""
