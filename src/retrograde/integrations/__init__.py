"""Front ends: other libraries' interfaces over retrograde. A front end uses only retrograde's public interface."""
